# SPDX-License-Identifier: Apache-2.0
"""Guarantee that a press loses at most a margin, with a set confidence, on contexts drawn like the measured ones.

The test bets against the hypothesis that the mean loss exceeds the margin (Waudby-Smith and Ramdas, Estimating means of bounded
random variables by betting, 2024): for losses d in [-1, 1] and a margin m, the wealth

    K = mean over bets b of  product over contexts of 1 + b (m - d),   0 <= b <= 1 / (1 - m)

has an expectation of at most 1 under the hypothesis, so K >= 1 / error has a probability of at most `error`, for any number
of contexts and any distribution. The error, 1 - confidence, is divided among the presses that are tested first. Each of them
may be followed by others in an order that was fixed before, until one fails, which needs no further correction (Learn then
Test, Angelopoulos et al., 2021).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvpress_eval.results.verdict import Margin, first_enough

BETS = (0.5, 0.75, 0.9)
"""Bets, as shares of the largest one that keeps the wealth positive."""
Losses = Mapping[str, Sequence[float]]
"""Losses against the full cache by task, one in [-1, 1] for each context."""


@dataclass(frozen=True)
class Guarantee:
    """Result of the test of one press."""

    press: str
    margin: Margin
    confidence: float
    contexts: int
    """Contexts of the task with the fewest."""
    wealth: float
    """Logarithm of the wealth of the task with the least."""
    needed: int | None
    """Contexts of each task with which the test would pass if the losses stay as they are; None if none would."""
    shares: int = 1
    """Presses among which the error is divided."""

    @property
    def holds(self) -> bool:
        """Whether the press loses at most the margin on every task, with the confidence."""
        return self.wealth >= threshold(self.confidence, self.shares)

    def phrase(self) -> str:
        """Return the result in words, without a subject and a full stop."""
        sure, contexts = f"{100 * self.confidence:g}% confidence", f"{self.contexts} held-out contexts of each task"
        if self.holds:
            return f"with {sure} it loses at most {self.margin} on each task, on contexts like these ({contexts})"
        missing = f"no guarantee that it loses at most {self.margin} with {sure}: "
        if self.needed is None:
            return missing + f"its losses on {contexts} speak against it"
        return missing + f"{contexts} are too few; about {self.needed} would tell"


def threshold(confidence: float, shares: int = 1) -> float:
    """Return the logarithm of the wealth with which one of `shares` presses passes."""
    return math.log(shares / (1 - confidence))


def least_contexts(margin: Margin, confidence: float, shares: int = 1) -> int:
    """Return the fewest contexts with which a press passes that loses on none of them."""
    return first_enough(0, lambda count: log_wealth([0.0] * count, margin.loss) >= threshold(confidence, shares))


def guarantee_of(press: str, losses: Losses, margin: Margin, confidence: float, shares: int = 1) -> Guarantee:
    """Return the guarantee of a press that must lose at most the margin on every task."""
    by_task = {task: log_wealth(values, margin.loss) for task, values in losses.items()}
    needed = [_needed(values, margin.loss, threshold(confidence, shares)) for values in losses.values()]
    return Guarantee(
        press,
        margin,
        confidence,
        min(map(len, losses.values())),
        min(by_task.values()),
        None if None in needed else max(count for count in needed if count is not None),
        shares,
    )


def guarantees(
    chains: Sequence[Sequence[tuple[str, Losses]]], margin: Margin, confidence: float
) -> list[Sequence[Guarantee]]:
    """Test each chain of presses in its order until one fails; the error is divided among the chains.

    Returns:
        For each chain, the guarantees that were tested; all but the last hold.
    """
    tested: list[Sequence[Guarantee]] = []
    for chain in chains:
        results: list[Guarantee] = []
        for press, losses in chain:
            results.append(guarantee_of(press, losses, margin, confidence, len(chains)))
            if not results[-1].holds:
                break
        tested.append(results)
    return tested


def log_wealth(losses: Sequence[float], margin: float) -> float:
    """Return the logarithm of the wealth after some losses in [-1, 1]; `margin` is in [0, 1)."""
    return _mean_wealth(_growth(losses, margin).sum(axis=1))


def _growth(losses: Sequence[float], margin: float) -> NDArray[np.float64]:
    """Return the logarithm of the factor of each loss under each bet, `[bets, losses]`."""
    bets = np.asarray(BETS)[:, None] / (1 - margin)
    growth: NDArray[np.float64] = np.log1p(bets * (margin - np.asarray(losses, dtype=float)))
    return growth


def _mean_wealth(growth: NDArray[np.float64]) -> float:
    """Return the logarithm of the mean over bets of wealths, given their logarithms `[bets]`."""
    return float(np.logaddexp.reduce(growth) - math.log(len(BETS)))


def _needed(losses: Sequence[float], margin: float, wealth: float) -> int | None:
    """Return the number of contexts with which the test would pass if their losses repeated these; None if none would."""
    rate = _growth(losses, margin).mean(axis=1)
    if rate.max() <= 0:
        return None
    return first_enough(0, lambda count: _mean_wealth(count * rate) >= wealth)
