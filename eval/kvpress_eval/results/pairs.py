# SPDX-License-Identifier: Apache-2.0
"""Comparison of every two presses on the samples that both answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from kvpress_eval.results.cells import CellResult
from kvpress_eval.results.stats import ScoreInterval, holm, paired_difference, paired_p_value
from kvpress_eval.results.summary import paired_scores, place_of


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


def compare_all(cells: Sequence[CellResult], order: Sequence[str]) -> list[Pair]:
    """Return all pairs of presses with complete cells at the same places, in the order of `order`."""
    of = {name: {place_of(cell): cell for cell in cells if cell.press == name} for name in order}
    complete = [name for name, cells_of in of.items() if cells_of and all(cell.complete for cell in cells_of.values())]
    tested = []
    for press, second in combinations(complete, 2):
        ours, theirs = of[press], of[second]
        if ours.keys() == theirs.keys():
            pairs = [paired_scores(cell, theirs[place]) for place, cell in ours.items()]
            if all(pairs):
                tested.append((press, second, paired_difference(pairs), paired_p_value(pairs)))
    adjusted = holm([p_value for *_, p_value in tested])
    return [Pair(*pair, together) for pair, together in zip(tested, adjusted, strict=True)]
