"""Means with 95% confidence intervals, paired differences, and whether they are more than chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
ALPHA = 0.05
PERMUTATIONS, _BATCH = 10_000, 100
_SEED = 0


@dataclass(frozen=True)
class Estimate:
    """A mean and the interval it lies in with 95% confidence."""

    mean: float
    low: float
    high: float


def mean_interval(groups: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean of the group means of scores in [0, 1], with its interval.

    Percentile bootstrap, resampled within each group, or over all scores if no group has any spread. Where
    all scores are 0, or all are 1, resampling cannot say anything; the exact binomial bound,
    1 - (alpha/2)^(1/n), says what n such samples can exclude.
    """
    values = np.concatenate([np.asarray(group, dtype=float) for group in groups])
    bound = 1 - (ALPHA / 2) ** (1 / len(values))
    if (values == 1).all():
        return Estimate(1.0, 1 - bound, 1.0)
    if (values == 0).all():
        return Estimate(0.0, 0.0, bound)
    if len(values) == 1:
        return Estimate(float(values[0]), 0.0, 1.0)
    spread = any(len(set(group)) > 1 for group in groups)
    return _bootstrap(groups if spread else [values.tolist()])


def paired_difference(groups: Sequence[Sequence[tuple[float, float]]]) -> Estimate:
    """Return the mean of `ours - theirs` over pairs of scores of the same sample, with its interval."""
    return _bootstrap([[ours - theirs for ours, theirs in group] for group in groups])


def paired_p_value(groups: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Return how likely a mean difference of this size, or a larger one, is if ours and theirs are the same by chance.

    A permutation test: ours and theirs of a sample change places at random, in every way there is or in `PERMUTATIONS` ways.
    Equal pairs are left out, as nothing changes with their places.
    """
    differences = [(ours - theirs) / len(group) for group in groups for ours, theirs in group if ours != theirs]
    observed = abs(sum(differences)) * (1 - 1e-9)  # sums of the same numbers in another order differ in the last bits
    ways = 2 ** len(differences)
    if ways <= PERMUTATIONS:
        exchanged = np.arange(ways)[:, None] >> np.arange(len(differences)) & 1
        return float(np.mean(_exchange(differences, exchanged) >= observed))
    rng = np.random.default_rng(_SEED)
    extreme = 0
    for _ in range(PERMUTATIONS // _BATCH):
        exchanged = rng.integers(2, size=(_BATCH, len(differences)))
        extreme += int((_exchange(differences, exchanged) >= observed).sum())
    return (extreme + 1) / (PERMUTATIONS + 1)


def _exchange(differences: Sequence[float], exchanged: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the size of the sum, for every way `[..., n]` of exchanging pairs."""
    return np.abs((1 - 2 * exchanged) @ np.asarray(differences))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm (1979): below 0.05, the chance of any false finding among all is below 5%."""
    order = np.argsort(p_values)
    steps = np.asarray(p_values)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return [float(p) for p in adjusted]


def _bootstrap(groups: Sequence[Sequence[float]]) -> Estimate:
    """Resample within groups; the same scores give the same interval, in whatever order they come."""
    rng = np.random.default_rng(_SEED)
    means = np.zeros(RESAMPLES)
    for group in sorted(sorted(group) for group in groups):
        values = np.asarray(group, dtype=float)
        means += values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means / len(groups), [ALPHA / 2, 1 - ALPHA / 2])
    return Estimate(float(np.mean([np.mean(group) for group in groups])), float(low), float(high))
