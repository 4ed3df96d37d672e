"""The report: one HTML file that needs no network, no server and no script."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from kvpress_eval import frontier, table
from kvpress_eval.highlight import SHADES
from kvpress_eval.results import CellResult
from kvpress_eval.runner import RunResult
from kvpress_eval.store import replace_file
from kvpress_eval.summary import PressSummary, summarise


def write_report(result: RunResult, path: Path) -> None:
    """Write the report of a run. Everything a model or a file said is escaped by the template."""
    summaries = summarise(result.cells)
    text = render(
        summaries=summaries,
        note=table.note(summaries),
        memory=frontier.frontier_svg(frontier.memory_points(summaries), frontier.MEMORY),
        speed=frontier.frontier_svg(frontier.speed_points(summaries), frontier.SPEED),
        tasks=list(dict.fromkeys(cell.cell.source.task for cell in result.cells)),
        grids=needle_grids(summaries),
        shown=shown_sample(result.cells),
        record=result.record,
    )
    replace_file(path, text.encode("utf-8", "replace"))


def render(**values: Any) -> str:
    """Fill in the template."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(table=table, heat=heat, shades=SHADES)
    source = resources.files("kvpress_eval").joinpath("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(**values)


def heat(value: float) -> str:
    """Return the background of a heat map cell: from white for 0 to blue for 1."""
    return f"hsl(205 {30 + 45 * value:.0f}% {97 - 37 * value:.0f}%)"


def needle_grids(summaries: Sequence[PressSummary]) -> list[dict[str, Any]]:
    """Return one heat map per task: its lengths and depths, and the presses with their accuracy at (length, depth)."""
    places = dict.fromkeys(place for summary in summaries for place in summary.grid)
    grids = []
    for task in dict.fromkeys(task for task, _, _ in places):
        own = [(length, depth) for name, length, depth in places if name == task]
        presses = [
            (s.press, {(n, d): value for (name, n, d), value in s.grid.items() if name == task}) for s in summaries
        ]
        lengths, depths = (
            sorted({length for length, _ in own}),
            sorted({depth for _, depth in own if depth is not None}),
        )
        grids.append({"task": task, "lengths": lengths, "depths": depths, "presses": presses})
    return grids


def shown_sample(cells: Sequence[CellResult]) -> dict[str, Any] | None:
    """Return the context to show, and per press its answer and, per layer, the pieces of text by shade."""
    chosen = [(cell, cell.kept) for cell in cells if cell.kept and cell.rows]
    if not chosen:
        return None
    first = chosen[0][1]
    presses = []
    for cell, kept in chosen:
        if kept["sample"] != first["sample"]:
            continue
        presses.append(
            {
                "press": cell.cell.press,
                "row": next(row for row in cell.rows if row["sample"] == kept["sample"]),
                "layers": [pieces(kept["text"], kept["offsets"], shades, kept["spans"]) for shades in kept["layers"]],
                "share": _shares(kept["layers"]),
            }
        )
    return {**first, "presses": presses}


def pieces(
    text: str, offsets: Sequence[Sequence[int]], shades: str, spans: Sequence[Sequence[int]]
) -> list[tuple[str, int, bool]]:
    """Return the text as runs of (piece, shade, holds the answer); neighbours that look alike are one run."""
    runs: list[tuple[str, int, bool]] = []
    end = 0
    for (start, stop), digit in zip(offsets, shades, strict=True):
        if stop <= start:
            continue
        piece, end = text[end:stop], stop
        look = int(digit, 16), any(low < stop and start < high for low, high in spans)
        if runs and runs[-1][1:] == look:
            piece = runs.pop()[0] + piece
        runs.append((piece, *look))
    return runs


def _shares(layers: Sequence[str]) -> list[float]:
    """Return the fraction of all pairs that each layer kept."""
    return [sum(int(digit, 16) for digit in shades) / (SHADES * len(shades)) for shades in layers]
