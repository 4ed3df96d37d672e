# SPDX-License-Identifier: Apache-2.0
"""Every two presses against each other, on the samples that both answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from kvpress_eval.results.cells import CellResult
from kvpress_eval.results.stats import Estimate, holm, paired_difference, paired_p_value
from kvpress_eval.results.summary import paired_scores, place_of


@dataclass(frozen=True)
class Pair:
    """Two presses: the mean of `press` minus `other`, and how likely one as large is by chance.

    `p_value` is for a pair that was chosen before its figures were seen, `adjusted` by Holm for all pairs of the leaderboard:
    for a pair that was picked because it looked good.
    """

    press: str
    other: str
    difference: Estimate
    p_value: float
    adjusted: float


def compare_all(cells: Sequence[CellResult], order: Sequence[str]) -> list[Pair]:
    """Return all pairs of presses with complete cells of the same places; of each, the first in `order` comes first."""
    of = {name: {place_of(cell): cell for cell in cells if cell.press == name} for name in order}
    whole = [name for name, own in of.items() if own and all(cell.complete for cell in own.values())]
    tested = []
    for press, other in combinations(whole, 2):
        ours, theirs = of[press], of[other]
        if ours.keys() == theirs.keys():
            pairs = [paired_scores(cell, theirs[place]) for place, cell in ours.items()]
            if all(pairs):
                tested.append((press, other, paired_difference(pairs), paired_p_value(pairs)))
    adjusted = holm([p_value for *_, p_value in tested])
    return [Pair(*found, together) for found, together in zip(tested, adjusted, strict=True)]
