# SPDX-License-Identifier: Apache-2.0
"""Leaderboards: presses that answered the same samples under the same conditions, and the comparison of every two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

from kvpress_eval.common.files import hash_json
from kvpress_eval.results.cells import CellResult
from kvpress_eval.results.read import Results
from kvpress_eval.results.stats import ScoreInterval, holm, paired_difference, paired_p_value
from kvpress_eval.results.store import CODE
from kvpress_eval.results.summary import BASELINE, PressSummary, independent_pairs, place_of, summarise

CONDITIONS = (
    "model", "weights", "kvpress", "device", "dtype", "question_aware", "batch_size", "max_seconds_per_sample",
    "max_context_length", "model_kwargs",
)  # fmt: skip
"""Keys of a spec that must be equal in cells that are compared. Other keys, except press and code, define the samples."""
_PRESS = ("press", CODE)
_MACHINE = ("machine", "processor", "device", "threads", "torch")
"""Keys in the record of a run that times depend on."""


@dataclass(frozen=True)
class Pair:
    """Comparison of two presses."""

    press: str
    other: str
    difference: ScoreInterval
    """Mean score of `press` minus that of `other`."""
    p_value: float
    """Valid for a pair that was chosen before its figures were seen."""
    adjusted: float
    """Holm-adjusted for all pairs of the leaderboard: valid for a pair picked by its figures."""


@dataclass(frozen=True)
class Board:
    """Cells of presses on the same samples: every press has one cell at every place."""

    conditions: Mapping[str, Any]
    """Values of `CONDITIONS`, equal in all cells."""
    cells: Sequence[CellResult]
    left_out: int
    """Number of rows that are ignored, because not all presses answered the sample."""
    machines: Sequence[str]
    """Descriptions of the machines that measured the cells."""

    @cached_property
    def summaries(self) -> list[PressSummary]:
        """One line per press."""
        return summarise(self.cells)

    @cached_property
    def pairs(self) -> list[Pair]:
        """Comparison of every two presses, the better one first."""
        return compare_all(self.cells, [summary.press for summary in self.ranked])

    @property
    def ranked(self) -> list[PressSummary]:
        """Summaries, the best press first."""
        return sorted(self.summaries, key=lambda summary: -summary.rank)

    @property
    def name(self) -> str:
        """The model and how it ran, in words."""
        seen = "question seen" if self.conditions["question_aware"] else "question not seen"
        return f"{self.conditions['model']}, {self.conditions['dtype']} on {self.conditions['device']}, {seen}"

    @property
    def tasks(self) -> list[str]:
        """The names of the tasks."""
        return list(dict.fromkeys(cell.task for cell in self.cells))

    @property
    def lengths(self) -> list[int]:
        """The configured lengths of the contexts."""
        return sorted({cell.length for cell in self.cells if cell.length})

    @property
    def comparable_times(self) -> bool:
        """Whether all times were taken on machines of one kind."""
        return len(self.machines) < 2


def make_boards(results: Results) -> list[Board]:
    """Return the leaderboards of results, the one with the most cells first.

    Each press was run on a set of places (task, length, depth, seed and so on). Each distinct set makes one leaderboard of all
    presses that were run on every place of the set, with only these places. A failed or unfinished cell counts as run, but its
    press has no mean.
    """
    groups: dict[str, list[CellResult]] = {}
    for cell in results.cells:
        groups.setdefault(hash_json(_conditions(cell)), []).append(cell)
    boards = [
        _make_board(coverage, by_press, results.records)
        for cells in groups.values()
        for by_press in [_by_press(cells, results.records)]
        for coverage in dict.fromkeys(frozenset(cells) for cells in by_press.values())
    ]
    return sorted(boards, key=lambda board: (-len(board.cells), board.name))


def compare_all(cells: Sequence[CellResult], order: Sequence[str]) -> list[Pair]:
    """Return all pairs of presses with complete cells at the same places, in the order of `order`."""
    of = {name: {place_of(cell): cell for cell in cells if cell.press == name} for name in order}
    complete = [name for name, cells_of in of.items() if cells_of and all(cell.complete for cell in cells_of.values())]
    tested = []
    for press, second in combinations(complete, 2):
        ours, theirs = of[press], of[second]
        if ours.keys() == theirs.keys():
            pairs = [independent_pairs(cell, theirs[place]) for place, cell in ours.items()]
            if all(pairs):
                tested.append((press, second, paired_difference(pairs), paired_p_value(pairs)))
    adjusted = holm([p_value for *_, p_value in tested])
    return [Pair(*pair, together) for pair, together in zip(tested, adjusted, strict=True)]


def difference_of(boards: Sequence[Board]) -> list[str]:
    """Return the conditions that boards differ in."""
    return [key for key in CONDITIONS if len({str(board.conditions.get(key)) for board in boards}) > 1]


def _make_board(
    coverage: Iterable[str], by_press: Mapping[str, Mapping[str, CellResult]], records: Mapping[str, dict[str, Any]]
) -> Board:
    presses = [cells for cells in by_press.values() if cells.keys() >= set(coverage)]
    places = sorted(coverage, key=lambda place: _order(presses[0][place]))
    shared = [_share([cells[place] for cells in presses]) for place in places]
    before = sum(len(cells[place].rows) for cells in presses for place in places)
    cells = _with_variants([place[index] for index in range(len(presses)) for place in shared])
    runs = {row["measured"]["run"] for cell in cells for row in cell.rows}
    machines = {" ".join(f"{key} {records[run].get(key)}" for key in _MACHINE) for run in runs if run in records}
    return Board(_conditions(cells[0]), cells, before - sum(len(cell.rows) for cell in cells), sorted(machines))


def _by_press(cells: Sequence[CellResult], records: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, CellResult]]:
    """Return the cells by press and place: `none` first, then by name. Of several versions of a press, the newest counts."""

    def measured(cell: CellResult) -> str:
        return max((records.get(row["measured"]["run"], {}).get("date", "") for row in cell.rows), default="")

    by_press: dict[str, dict[str, CellResult]] = {}
    for cell in sorted(cells, key=lambda cell: (*_order(cell), measured(cell))):
        question = {key: value for key, value in cell.spec.items() if key not in (*_PRESS, *CONDITIONS)}
        by_press.setdefault(cell.press, {})[hash_json(question)] = cell
    return by_press


def _share(cells: Sequence[CellResult]) -> list[CellResult]:
    """Return the cells of one place, reduced to the samples that all complete cells have."""
    answered = [cell.scores.keys() for cell in cells if cell.complete]
    common = set(answered[0]).intersection(*answered) if answered else set()
    return [
        replace(cell, rows=[row for row in cell.rows if row["sample"] in common], samples=len(common))
        if cell.complete
        else cell
        for cell in cells
    ]


def _with_variants(cells: Sequence[CellResult]) -> list[CellResult]:
    """Return the cells; the name of a task with several settings gets the settings of the cell."""
    values: dict[tuple[str, str], set[str]] = {}
    for cell in cells:
        for key in cell.spec.keys() - {*_PRESS, "task", "length", "depth"}:
            values.setdefault((cell.task, key), set()).add(str(cell.spec[key]))
    varying: dict[str, list[str]] = {}
    for (task, key), texts in sorted(values.items()):
        if len(texts) > 1:
            varying.setdefault(task, []).append(key)
    return [_rename(cell, varying[cell.task]) if cell.task in varying else cell for cell in cells]


def _rename(cell: CellResult, keys: Sequence[str]) -> CellResult:
    variant = ", ".join(f"{key.replace('_', ' ')} {str(cell.spec.get(key))[:12]}" for key in keys)
    return replace(cell, spec={**cell.spec, "task": f"{cell.task} ({variant})"})


def _conditions(cell: CellResult) -> dict[str, Any]:
    return {key: cell.spec.get(key) for key in CONDITIONS}


def _order(cell: CellResult) -> tuple[Any, ...]:
    return cell.press != BASELINE, cell.press, cell.task, cell.length, cell.depth or 0, str(cell.spec.get("seed"))
