"""Means with 95% confidence intervals, and paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
ALPHA = 0.05
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


def _bootstrap(groups: Sequence[Sequence[float]]) -> Estimate:
    rng = np.random.default_rng(_SEED)
    means = np.zeros(RESAMPLES)
    for group in groups:
        values = np.asarray(group, dtype=float)
        means += values[rng.integers(len(values), size=(RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means / len(groups), [ALPHA / 2, 1 - ALPHA / 2])
    return Estimate(float(np.mean([np.mean(group) for group in groups])), float(low), float(high))
