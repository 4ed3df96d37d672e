# SPDX-License-Identifier: Apache-2.0
"""Result of a search: figures on held-out samples, the frontier, a sentence about the pick, and the file with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from kvpress.cache.report import format_bytes
from kvpress_eval.common.errors import OutputError
from kvpress_eval.common.files import differences, read_object, replace_file, write_json
from kvpress_eval.common.terminal import MISSING, Name, number, plain_table
from kvpress_eval.results.cells import CellResult
from kvpress_eval.results.guarantee import Guarantee
from kvpress_eval.results.stats import ScoreInterval, mean_interval, paired_difference
from kvpress_eval.results.summary import independent_pairs, summarise
from kvpress_eval.results.verdict import judge, points
from kvpress_eval.tuning.items import SplitPart
from kvpress_eval.tuning.sizing import PlannedSize
from kvpress_eval.tuning.space import NOTHING

PRESS, IDENTITY, RESULT, SCORES, JOURNAL = "press.yaml", "tune.json", "result.json", "search.jsonl", "optuna.journal"
"""Files of the output folder: the pick, the identity of the search, all figures, all scores, and Optuna's journal."""

_WIDTH = 200
"""Columns of the table in a file or a pipe: compositions have long names."""
_NARROW = 110
"""Fewest columns of a terminal for all columns of the table."""


@dataclass(frozen=True)
class Measured:
    """Figures of a press on held-out samples."""

    press: str
    samples: int
    accuracy: ScoreInterval
    difference: ScoreInterval | None
    worst: tuple[str, ScoreInterval] | None
    """Task with the largest loss from the full cache, and its change."""
    worst_changes: Sequence[Sequence[float]]
    """Changes of the samples of this task against the full cache, by cell; empty for the full cache."""
    tasks: Mapping[str, ScoreInterval]
    bytes: float
    """Mean bytes of a compressed context."""
    peak_bytes: float | None
    """Mean of the planned peak bytes while a context is read; None if a stored row has none."""
    uncompressed_bytes: float
    milliseconds_per_token: float | None

    @property
    def factor(self) -> float:
        """Uncompressed size divided by compressed size."""
        return self.uncompressed_bytes / self.bytes


@dataclass(frozen=True)
class Tuned:
    """The picked press with all figures."""

    press: str
    frontier: Sequence[Measured]
    """All measured presses, the full cache first."""
    sentence: str
    kept: bool | None
    """Whether the loss is within `max_drop`, or guaranteed where that was required; None without both."""
    path: Path
    guarantee: Guarantee | None = None
    """Guarantee of the press, which it may have failed; None if none was required."""
    planned: PlannedSize | None = None
    """Planned sizes of the press at the length of the limit."""

    @property
    def pick(self) -> Measured:
        """The figures of the press."""
        return next(item for item in self.frontier if item.press == self.press)


def measured(cells: Sequence[CellResult]) -> list[Measured]:
    """Return the figures of every press with complete cells: the full cache first, then by size."""
    by_press: dict[str, list[CellResult]] = {}
    for cell in cells:
        by_press.setdefault(cell.press, []).append(cell)
    full = by_press[NOTHING]
    figures = []
    for summary in summarise(cells):
        press_cells = by_press[summary.press]
        if summary.accuracy is None or summary.bytes is None or summary.factor is None:
            continue
        groups = _by_task(press_cells)
        pairs = _pairs_by_task(press_cells, full)
        changes = {task: paired_difference(task_pairs) for task, task_pairs in pairs.items()}
        worst = min(changes.items(), key=lambda item: item[1].mean) if summary.press != NOTHING else None
        worst_pairs = pairs[worst[0]] if worst else []
        figures.append(
            Measured(
                summary.press,
                summary.samples,
                summary.accuracy,
                summary.difference,
                worst,
                [[ours - theirs for ours, theirs in cell] for cell in worst_pairs],
                {task: mean_interval(scores) for task, scores in groups.items()},
                summary.bytes,
                summary.peak_bytes,
                summary.bytes * summary.factor,
                summary.milliseconds_per_token,
            )
        )
    return sorted(figures, key=lambda item: (item.press != NOTHING, item.bytes))


def _by_task(cells: Sequence[CellResult]) -> dict[str, list[list[float]]]:
    groups: dict[str, list[list[float]]] = {}
    for cell in cells:
        groups.setdefault(cell.task, []).append(cell.independent_scores)
    return groups


def _pairs_by_task(
    ours: Sequence[CellResult], theirs: Sequence[CellResult]
) -> dict[str, list[list[tuple[float, float]]]]:
    groups: dict[str, list[list[tuple[float, float]]]] = {}
    for ours_cell, theirs_cell in zip(ours, theirs, strict=True):
        groups.setdefault(ours_cell.task, []).append(independent_pairs(ours_cell, theirs_cell))
    return groups


def losses_by_context(cells: Sequence[CellResult], held_out: Sequence[SplitPart]) -> dict[str, dict[str, list[float]]]:
    """Return by press and task the mean loss against the full cache of each context, for presses with complete cells.

    Contexts from one document count as one.
    """
    context_of = {
        (part.task, item.id): (part.length, document)
        for part in held_out
        for document, items in zip(part.documents, part.contexts, strict=True)
        for item in items
    }
    full: dict[str, dict[str, float]] = {}
    by_press: dict[str, list[CellResult]] = {}
    for cell in cells:
        by_press.setdefault(cell.press, []).append(cell)
    for cell in by_press[NOTHING]:
        full.setdefault(cell.task, {}).update(cell.scores)
    losses: dict[str, dict[str, list[float]]] = {}
    for press, press_cells in by_press.items():
        if not all(cell.complete for cell in press_cells):
            continue
        tasks: dict[str, dict[Any, list[float]]] = {}
        for cell in press_cells:
            contexts = tasks.setdefault(cell.task, {})
            for sample, score in cell.scores.items():
                contexts.setdefault(context_of[cell.task, sample], []).append(full[cell.task][sample] - score)
        losses[press] = {task: [fmean(values) for values in contexts.values()] for task, contexts in tasks.items()}
    return losses


def print_frontier(frontier: Sequence[Measured], pick: str, console: Console) -> None:
    """Print the figures of the measured presses; an arrow marks the pick.

    A terminal narrower than `_NARROW` columns gets the columns that decide: size, peak, worst task and its change.
    """
    wide = console if console.is_terminal else Console(file=console.file, width=_WIDTH)
    if wide.width < _NARROW:
        table = plain_table(["", "press", "worst task"], ["smaller", "cache", "peak", "change", "95%"], gap=1)
    else:
        columns = ["smaller", "cache", "peak", "mean %", "95%", "vs none", "worst task", "change", "95%", "ms/token"]
        table = plain_table(["", "press"], columns)
    for row in frontier:
        worst, change = row.worst or (MISSING, None)
        name = Text(">" if row.press == pick else ""), Name(row.press)
        peak = MISSING if row.peak_bytes is None else format_bytes(row.peak_bytes)
        size = f"{row.factor:.1f}x", format_bytes(row.bytes), peak
        changed = _points(change), _interval(change)
        if wide.width < _NARROW:
            table.add_row(*name, Name(worst), *size, *changed)
            continue
        accuracy = f"{100 * row.accuracy.low:.0f}-{100 * row.accuracy.high:.0f}"
        mean = f"{100 * row.accuracy.mean:.1f}", accuracy, _points(row.difference)
        table.add_row(*name, *size, *mean, Name(worst), *changed, number(row.milliseconds_per_token, 1))
    wide.print(table)


def sentence(
    press: str, frontier: Sequence[Measured], unit: str, max_drop: float | None, guarantee: Guarantee | None = None
) -> str:
    """Return a sentence about the pick: its memory, its accuracy on held-out samples, and the verdict on its worst task.

    The margin of the verdict is `max_drop`, or 3 points without it. If the mean loss exceeds `max_drop`, the sentence also
    names the smallest press whose mean loss does not, or the one that loses least. A guarantee takes the place of the verdict.
    """
    by_press = {item.press: item for item in frontier}
    pick, full = by_press[press], by_press[NOTHING]
    if press == NOTHING:
        return (
            f"Use no press: the full cache of a context, {format_bytes(full.bytes)}{_peak(full)}, meets the limit, and no "
            f"smaller one that was measured keeps within what may be lost; on {full.samples} held-out samples its {unit} is "
            f"{_percent(full.accuracy)}."
        )
    text = (
        f"Use {pick.press}: it holds {format_bytes(pick.bytes)} instead of {format_bytes(full.bytes)} of a context, "
        f"{pick.factor:.1f} times less{_peak(pick)}; on {pick.samples} held-out samples its {unit} is "
        f"{_percent(pick.accuracy)} where the full cache's is {_percent(full.accuracy)}"
    )
    if pick.worst is not None:
        task, change = pick.worst
        verdict = judge(press, pick.factor, pick.worst_changes, points() if max_drop is None else points(max_drop))
        phrase = verdict.phrase() if guarantee is None else guarantee.phrase()
        text += f", and its worst task, {task}, changes by {_points(change)} points: {phrase}"
    if within(pick, max_drop) is False:
        text += (
            f"; its mean change is more than the {max_drop:g} that may be lost; {_instead(pick, frontier, max_drop)}"
        )
    return text + "."


def _peak(figures: Measured) -> str:
    """Return a clause with the peak, empty without one."""
    if figures.peak_bytes is None:
        return ""
    return f", with a peak of {format_bytes(figures.peak_bytes)} while the context is read"


def _instead(pick: Measured, frontier: Sequence[Measured], max_drop: float | None) -> str:
    """Return a clause that names the press to use if the pick loses too much."""
    kept = [item for item in frontier if within(item, max_drop)]
    worsts = [(item.worst[1].mean, -item.bytes, item) for item in frontier if item.worst is not None]
    best = min(kept, key=lambda item: item.bytes) if kept else max(worsts, key=lambda worst: worst[:2])[-1]
    if best is pick or best.worst is None:
        return "no other press that was measured loses less: allow it more memory"
    task, change = best.worst
    named = f"{best.press}, {best.factor:.1f} times less, changes its worst task, {task}, by {_points(change)} points"
    return f"of the others measured, {named}{'' if kept else ', and none loses less'}"


def within(pick: Measured, max_drop: float | None) -> bool | None:
    """Whether the worst task loses at most `max_drop` points; None without `max_drop`."""
    if max_drop is None or pick.worst is None:
        return None
    return -100 * pick.worst[1].mean <= max_drop


def write_press(path: Path, tuned: Tuned, conditions: Mapping[str, Any]) -> None:
    """Write the pick as a file for `kvpress.get_press`, with the conditions of the search and the held-out figures."""
    figures_of = tuned.pick
    figures = {
        "samples": figures_of.samples,
        "bytes": round(figures_of.bytes),
        "peak_bytes": None if figures_of.peak_bytes is None else round(figures_of.peak_bytes),
        "smaller": round(figures_of.factor, 2),
        "mean": _list(figures_of.accuracy),
        "mean_of_full_cache": _list(tuned.frontier[0].accuracy),
        "worst_task": figures_of.worst[0] if figures_of.worst else None,
        "worst_change": _list(figures_of.worst[1]) if figures_of.worst else None,
    }
    record = {"press": tuned.press, "tuned": dict(conditions), "held_out": figures, **_promised(tuned)}
    text = "# Made by `kvpress tune`; load it with kvpress.get_press or --press @FILE. Intervals are mean, low, high.\n"
    text += yaml.safe_dump(record, sort_keys=False, allow_unicode=True, width=120)
    replace_file(path, text.encode())


def write_result(path: Path, tuned: Tuned, standings: Sequence[Mapping[str, Any]]) -> None:
    """Write all figures as JSON."""
    rows = [
        {
            "press": item.press,
            "samples": item.samples,
            "bytes": item.bytes,
            "peak_bytes": item.peak_bytes,
            "smaller": item.factor,
            "mean": _list(item.accuracy),
            "change": item.difference and _list(item.difference),
            "worst_task": item.worst and item.worst[0],
            "worst_change": item.worst and _list(item.worst[1]),
            "tasks": {task: _list(estimate) for task, estimate in item.tasks.items()},
            "milliseconds_per_token": item.milliseconds_per_token,
        }
        for item in tuned.frontier
    ]
    summary: dict[str, Any] = {"press": tuned.press, "sentence": tuned.sentence, "kept": tuned.kept}
    write_json(path, {**summary, **_promised(tuned), "frontier": rows, "searched": list(standings)})


def belong(path: Path, identity: Mapping[str, Any]) -> None:
    """Claim the folder for a search with this identity.

    Raises:
        OutputError: the folder belongs to another search, whose differences the message names, or has files of other origin.
    """
    there = read_object(path)
    if there is None:
        if path.exists():
            raise OutputError(f"{path} cannot be read: use a new --out")
        if existing := [name for name in (PRESS, RESULT, SCORES, JOURNAL) if (path.parent / name).exists()]:
            raise OutputError(
                f"{path.parent} holds {', '.join(existing)}, which no search has written: use a new --out"
            )
        write_json(path, dict(identity))
        return
    if listed := differences(there, identity):
        raise OutputError(f"{path.parent} belongs to another search ({listed}): use a new --out")


def _promised(tuned: Tuned) -> dict[str, Any]:
    """Return the planned sizes and the guarantee of the pick, where there are any."""
    promised: dict[str, Any] = {}
    if tuned.planned is not None:
        promised["planned"] = asdict(tuned.planned)
    if tuned.guarantee is not None:
        promised["guarantee"] = _guarantee(tuned.guarantee)
    return promised


def _guarantee(guarantee: Guarantee) -> dict[str, Any]:
    return {
        "holds": guarantee.holds,
        "confidence": guarantee.confidence,
        "points": guarantee.margin.size,
        "contexts": guarantee.contexts,
        "contexts_needed": guarantee.needed,
    }


def _percent(estimate: ScoreInterval) -> str:
    return f"{100 * estimate.mean:.1f}% (95% {100 * estimate.low:.0f} to {100 * estimate.high:.0f})"


def _points(estimate: ScoreInterval | None) -> str:
    return MISSING if estimate is None else f"{100 * estimate.mean:+.1f}"


def _interval(estimate: ScoreInterval | None) -> str:
    return MISSING if estimate is None else f"{100 * estimate.low:+.0f} to {100 * estimate.high:+.0f}"


def _list(estimate: ScoreInterval) -> list[float]:
    return [round(value, 4) for value in (estimate.mean, estimate.low, estimate.high)]
