"""What a run, or several together, came to: a page for the browser, plots, and tables for people and programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kvpress_eval import frontier, page, table
from kvpress_eval.boards import Board, difference_of, make_boards
from kvpress_eval.errors import OutputError, translated_os_errors
from kvpress_eval.export import to_csv, to_parquet
from kvpress_eval.results import CellResult, Results, flatten, read_runs
from kvpress_eval.store import replace_file
from kvpress_eval.summary import Place, PressSummary, place_of


def write_outputs(folders: Sequence[Path], out: Path) -> list[Path]:
    """Write the report of runs to `out`, and plots and tables beside it; return where they are.

    Raises:
        DataError: a folder is not that of a run, or there is nothing in any.
        OutputError: `out` cannot be written.
    """
    results = read_runs(folders)
    boards = make_boards(results)
    if out.is_dir():
        raise OutputError(f"{out} is a folder; name a file such as {out / 'report.html'}")
    with translated_os_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, to_html(results, boards, [str(folder) for folder in folders]).encode("utf-8", "replace"))
    png = out.with_name("frontier.png")
    with translated_os_errors(png):
        frontier.write_frontier_png(boards[0].summaries, png)
    presses = [record for number, board in enumerate(boards, 1) for record in _press_records(number, board)]
    samples = [{**cell.spec, **row} for cell in results.cells for row in flatten(cell)]
    files = {
        "table.md": "\n".join(f"## {board.name}\n\n{table.to_markdown(board.ranked)}" for board in boards).encode(),
        "table.csv": to_csv(presses),
        "table.parquet": to_parquet(presses),
        "samples.csv": to_csv(samples),
        "samples.parquet": to_parquet(samples),
    }
    for name, content in files.items():
        replace_file(out.with_name(name), content)
    return [out, png, *(out.with_name(name) for name in files)]


def to_html(results: Results, boards: Sequence[Board], folders: Sequence[str]) -> str:
    """Return the page. Everything a model or a file said is escaped by the template."""
    used = {row["measured"]["run"] for cell in results.cells for row in cell.rows}
    return page.render(
        "report.html.j2",
        boards=boards,
        views=[_view(number, board) for number, board in enumerate(boards, 1)],
        cells=len(results.cells),
        folders=folders,
        problems=results.problems,
        differing=difference_of(boards),
        records=[record for name, record in results.records.items() if name in used],
    )


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
    """Return the context that most presses were recorded on, and per press its answer and what it kept."""
    recorded = [(place_of(cell), cell.kept["sample"], cell, cell.kept) for cell in cells if cell.kept]
    if not recorded:
        return None
    most: tuple[Place, str] = Counter((place, sample) for place, sample, *_ in recorded).most_common(1)[0][0]
    chosen = [(cell, kept) for place, sample, cell, kept in recorded if (place, sample) == most]
    presses = [
        {
            "press": cell.press,
            "row": next((row for row in cell.rows if row["sample"] == kept["sample"]), None),
            "kept": page.kept_view(kept),
        }
        for cell, kept in chosen
    ]
    # A press that drops something says more than one that keeps everything.
    least = [min((share for shares in kept["budgets"] for share in shares), default=1) for _, kept in chosen]
    opened = next((number for number, share in enumerate(least, 1) if share < 1), 1)
    return {**chosen[0][1], "presses": presses, "opened": opened}


def _view(number: int, board: Board) -> dict[str, Any]:
    summaries = board.summaries
    return {
        "id": f"board-{number}",
        "board": board,
        "memory": Markup(frontier.frontier_svg(frontier.memory_points(summaries), frontier.MEMORY)),  # noqa: S704
        "speed": Markup(frontier.frontier_svg(frontier.speed_points(summaries), frontier.SPEED)),  # noqa: S704
        "grids": needle_grids(board.ranked),
        "shown": shown_sample(board.cells),
    }


def _press_records(number: int, board: Board) -> list[dict[str, Any]]:
    """Return one line per press of a leaderboard."""
    return [{"board": number, **board.conditions, **record} for record in table.records(board.ranked)]
