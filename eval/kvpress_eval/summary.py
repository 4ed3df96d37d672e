"""One line per press: accuracy, memory and time over all cells of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from kvpress_eval.results import CellResult
from kvpress_eval.stats import Estimate, mean_interval, paired_difference

BASELINE = "none"

Place = tuple[str, int, float | None]
"""A task, a length and a depth."""


@dataclass(frozen=True)
class PressSummary:
    """What a press did. A number that was not measured on every sample is None: no mean over what is left.

    `grid` is the accuracy at each place of a run with several depths.
    """

    press: str
    samples: int
    accuracy: Estimate | None
    difference: Estimate | None
    tasks: dict[str, float | None]
    bytes: float | None
    factor: float | None
    bits_per_value: float | None
    kept: float | None
    prefill_seconds: float | None
    milliseconds_per_token: float | None
    problems: tuple[str, ...]
    grid: dict[Place, float | None] = field(default_factory=dict)

    @property
    def rank(self) -> float:
        """What leaderboards sort by: the accuracy, below everything if there is none."""
        return self.accuracy.mean if self.accuracy else -1.0

    @property
    def worst(self) -> tuple[str, float] | None:
        """The task with the lowest accuracy, if all were measured."""
        scores = [(value, task) for task, value in self.tasks.items() if value is not None]
        return min(scores)[::-1] if self.accuracy and scores else None


def summarise(results: Sequence[CellResult]) -> list[PressSummary]:
    """Return one summary per press, in the order of the run."""
    by_press: dict[str, list[CellResult]] = {}
    for result in results:
        by_press.setdefault(result.cell.press, []).append(result)
    baseline = {_place(cell): cell for cell in by_press.get(BASELINE, [])}
    return [_summarise(press, cells, baseline) for press, cells in by_press.items()]


def _summarise(press: str, cells: Sequence[CellResult], baseline: dict[Place, CellResult]) -> PressSummary:
    complete = all(cell.complete for cell in cells)
    rows = [row for cell in cells for row in cell.rows]
    others = [baseline.get(_place(cell)) for cell in cells]
    pairs = [_pairs(cell, other) for cell, other in zip(cells, others, strict=True) if other]
    comparable = complete and press != BASELINE and sum(map(len, pairs)) == len(rows)
    seconds = [row["measured"]["seconds_per_token"] for row in rows]
    size, whole = sum(row["bytes"] for row in rows), sum(row["uncompressed_bytes"] for row in rows)
    return PressSummary(
        press=press,
        samples=len(rows),
        accuracy=mean_interval([list(cell.scores.values()) for cell in cells]) if complete else None,
        difference=paired_difference(pairs) if comparable else None,
        tasks=_by_task(cells),
        bytes=size / len(rows) if complete else None,
        factor=whole / size if complete else None,
        bits_per_value=fmean(row["bits_per_value"] for row in rows) if complete else None,
        kept=fmean(row["kept"] for row in rows) if complete else None,
        prefill_seconds=median(row["measured"]["prefill_seconds"] for row in rows) if complete else None,
        milliseconds_per_token=_milliseconds(seconds) if complete else None,
        problems=tuple(
            f"{cell.cell.source.task} {cell.cell.source.length}{cell.cell.where}: {cell.problem}"
            for cell in cells
            if cell.problem
        ),
        grid=_grid(cells),
    )


def _place(result: CellResult) -> Place:
    return result.cell.source.task, result.cell.source.length, result.cell.depth


def _pairs(ours: CellResult, theirs: CellResult) -> list[tuple[float, float]]:
    return [(score, theirs.scores[sample]) for sample, score in ours.scores.items() if sample in theirs.scores]


def _by_task(cells: Iterable[CellResult]) -> dict[str, float | None]:
    groups: dict[str, list[CellResult]] = {}
    for cell in cells:
        groups.setdefault(cell.cell.source.task, []).append(cell)
    return {
        task: fmean(fmean(cell.scores.values()) for cell in group) if all(cell.complete for cell in group) else None
        for task, group in groups.items()
    }


def _grid(cells: Sequence[CellResult]) -> dict[Place, float | None]:
    """Return the accuracy by place, if there is more than one depth."""
    placed = [cell for cell in cells if cell.cell.depth is not None]
    if len({cell.cell.depth for cell in placed}) < 2:
        return {}
    return {_place(cell): fmean(cell.scores.values()) if cell.complete else None for cell in placed}


def _milliseconds(seconds: Sequence[float | None]) -> float | None:
    timed = [value for value in seconds if value is not None]
    return median(timed) * 1000 if timed else None
