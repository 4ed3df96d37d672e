# SPDX-License-Identifier: Apache-2.0
"""Summary of each press: accuracy, memory and time over all cells of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import TypeVar

from kvpress_eval.results.cells import CellResult
from kvpress_eval.results.stats import (
    ALPHA,
    ScoreInterval,
    holm,
    mean_interval,
    paired_difference,
    paired_p_value,
    pool,
)
from kvpress_eval.results.verdict import Verdict, conclude, judge, points

BASELINE = "none"

Place = tuple[str, int, float | None]
"""A task, a length and a depth."""
_Key = TypeVar("_Key")


@dataclass(frozen=True)
class PressSummary:
    """Figures of a press. A figure that was not measured on every sample is None, never a mean over some of them."""

    press: str
    samples: int
    accuracy: ScoreInterval | None
    difference: ScoreInterval | None
    """Accuracy minus that of `none`, over paired samples."""
    p_value: float | None
    """Paired test against `none`, Holm-adjusted for all tested presses."""
    tasks: dict[str, float | None]
    """Mean accuracy by task."""
    lengths: dict[int, float | None]
    """Mean accuracy by length."""
    bytes: float | None
    """Mean bytes of the compressed context."""
    peak_bytes: float | None
    """Mean of the planned peak bytes while a context is read; None also if one context has no plan."""
    factor: float | None
    """Uncompressed size of the context's cache, divided by its compressed size."""
    end_factor: float | None
    """Same as `factor`, for context, question and answer."""
    bits_per_value: float | None
    kept: float | None
    prefill_seconds: float | None
    milliseconds_per_token: float | None
    problems: tuple[str, ...]
    grid: dict[Place, float | None] = field(default_factory=dict)
    """Accuracy by place, in a run with several depths."""
    same_answers: float | None = None
    """Share of samples with exactly the text of the answer of `none`."""
    compressed: bool = True
    """False if the press compressed none of the contexts, although it is meant to."""
    verdict: Verdict | None = None
    """Comparison of the difference with a margin of 3 points."""
    cut: int = 0
    """Number of samples whose context lost its middle, because it exceeded the run's `max_context_length`."""

    @property
    def rank(self) -> float:
        """Sort key of leaderboards: the accuracy, or -1 without one."""
        return self.accuracy.mean if self.accuracy else -1.0

    @property
    def significant(self) -> bool:
        """Whether the difference from `none` is significant after adjustment for all presses of the table."""
        return self.p_value is not None and self.p_value < ALPHA

    @property
    def worst(self) -> tuple[str, float] | None:
        """The task with the lowest accuracy, if all were measured."""
        scores = [(value, task) for task, value in self.tasks.items() if value is not None]
        return min(scores)[::-1] if self.accuracy and scores else None


def summarise(results: Sequence[CellResult]) -> list[PressSummary]:
    """Return one summary per press, in the order of the results, which are of one model under the same conditions."""
    by_press: dict[str, list[CellResult]] = {}
    for result in results:
        by_press.setdefault(result.press, []).append(result)
    baseline = {place_of(cell): cell for cell in by_press.get(BASELINE, [])}
    summaries = [_summarise(press, cells, baseline) for press, cells in by_press.items()]
    tested = [summary for summary in summaries if summary.p_value is not None]
    adjusted = dict(
        zip((summary.press for summary in tested), holm([summary.p_value or 0.0 for summary in tested]), strict=True)
    )
    return [replace(summary, p_value=adjusted.get(summary.press)) for summary in summaries]


def conclusion(summaries: Sequence[PressSummary]) -> str | None:
    """Return sentences with the smallest press that loses at most the margin; None without any comparison."""
    full = next((summary for summary in summaries if summary.press == BASELINE), None)
    verdicts = [summary.verdict for summary in summaries if summary.verdict and summary.verdict.factor > 1]
    if full is None or full.accuracy is None or not verdicts:
        return None
    return conclude(verdicts, full.accuracy)


def place_of(result: CellResult) -> Place:
    """Return the task, the length and the depth of a cell."""
    return result.task, result.length, result.depth


def _summarise(press: str, cells: Sequence[CellResult], baseline: dict[Place, CellResult]) -> PressSummary:
    complete = all(cell.complete for cell in cells)
    rows = [row for cell in cells for row in cell.rows]
    references = [baseline.get(place_of(cell)) for cell in cells]
    pairs = [paired_scores(cell, reference) for cell, reference in zip(cells, references, strict=True) if reference]
    comparable = complete and press != BASELINE and sum(map(len, pairs)) == len(rows)
    independent = [
        independent_pairs(cell, reference) for cell, reference in zip(cells, references, strict=True) if reference
    ]
    size, uncompressed = sum(row["bytes"] for row in rows), sum(row["uncompressed_bytes"] for row in rows)
    end, end_uncompressed = sum(row["end_bytes"] for row in rows), sum(row["end_uncompressed_bytes"] for row in rows)
    milliseconds = _median(row["measured"]["seconds_per_token"] for row in rows) if complete else None
    num_uncompressed = sum(not row.get("compressed", True) for row in rows)
    problems = [f"{cell.label}: {cell.problem}" for cell in cells if cell.problem]
    if num_uncompressed:
        problems.append(f"not compressed: {num_uncompressed} of {len(rows)} contexts are held as they are")
    return PressSummary(
        press=press,
        samples=len(rows),
        accuracy=mean_interval([cell.independent_scores for cell in cells]) if complete else None,
        difference=paired_difference(independent) if comparable else None,
        p_value=paired_p_value(independent) if comparable else None,
        tasks=_means(cells, lambda cell: cell.task),
        lengths=_means(cells, lambda cell: cell.length),
        bytes=size / len(rows) if complete else None,
        peak_bytes=_mean(row.get("peak_bytes") for row in rows) if complete else None,
        factor=uncompressed / size if complete else None,
        end_factor=end_uncompressed / end if complete else None,
        bits_per_value=fmean(row["bits_per_value"] for row in rows) if complete else None,
        kept=fmean(row["kept"] for row in rows) if complete else None,
        prefill_seconds=_median(row["measured"]["prefill_seconds"] for row in rows) if complete else None,
        milliseconds_per_token=milliseconds and 1000 * milliseconds,
        problems=tuple(problems),
        grid=_grid(cells),
        same_answers=_same_answers(cells, references) if comparable else None,
        compressed=num_uncompressed < max(1, len(rows)),
        verdict=judge(press, uncompressed / size, _changes(independent), points(), len(rows)) if comparable else None,
        cut=sum(row.get("cut_tokens", 0) > 0 for row in rows),
    )


def paired_scores(ours: CellResult, theirs: CellResult) -> list[tuple[float, float]]:
    """Return the scores of the samples that both answered."""
    return [(score, theirs.scores[sample]) for sample, score in ours.scores.items() if sample in theirs.scores]


def independent_pairs(ours: CellResult, theirs: CellResult) -> list[tuple[float, float]]:
    """Return `paired_scores` with one pair for each document, because answers about one document are not independent."""
    pairs = paired_scores(ours, theirs)
    documents = [document for sample, document in ours.documents.items() if sample in theirs.scores]
    if not pairs:
        return []
    first, second = zip(*pairs, strict=True)
    return list(zip(pool(first, documents), pool(second, documents), strict=True))


def _changes(pairs: Iterable[Iterable[tuple[float, float]]]) -> list[list[float]]:
    return [[ours - theirs for ours, theirs in group] for group in pairs]


def _same_answers(cells: Sequence[CellResult], references: Sequence[CellResult | None]) -> float | None:
    """Return the share of answers that are the text of the reference; None where samples are judged without an answer."""
    pairs: list[tuple[str | None, str | None]] = []
    for cell, reference in zip(cells, references, strict=True):
        texts = {row["sample"]: row.get("prediction") for row in reference.rows} if reference else {}
        pairs += [(row.get("prediction"), texts[row["sample"]]) for row in cell.rows]
    if any(text is None for text, _ in pairs):
        return None
    return fmean(text == right for text, right in pairs)


def _means(cells: Iterable[CellResult], key: Callable[[CellResult], _Key]) -> dict[_Key, float | None]:
    """Return the mean accuracy of the cells with the same key, where all of them are complete."""
    groups: dict[_Key, list[CellResult]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return {
        name: fmean(fmean(cell.scores.values()) for cell in group) if all(cell.complete for cell in group) else None
        for name, group in groups.items()
    }


def _grid(cells: Sequence[CellResult]) -> dict[Place, float | None]:
    """Return the accuracy by place, if there is more than one depth."""
    placed = [cell for cell in cells if cell.depth is not None]
    if len({cell.depth for cell in placed}) < 2:
        return {}
    return _means(placed, place_of)


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean, None if a value is missing, as in rows of earlier versions."""
    present = list(values)
    numbers = [value for value in present if value is not None]
    return fmean(numbers) if numbers and len(numbers) == len(present) else None


def _median(values: Iterable[float | None]) -> float | None:
    timed = [value for value in values if value is not None]
    return median(timed) if timed else None
