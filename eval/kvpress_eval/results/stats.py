# SPDX-License-Identifier: Apache-2.0
"""Means with 95% confidence intervals, and paired differences with their significance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

RESAMPLES = 2000
ALPHA = 0.05
PERMUTATIONS = 10_000
_SEED = 0


@dataclass(frozen=True)
class ScoreInterval:
    """Mean with its 95% confidence interval."""

    mean: float
    low: float
    high: float


def pool(values: Sequence[float], clusters: Sequence[str]) -> list[float]:
    """Return one value for each cluster, such as all answers about one document; their mean is that of all values.

    Values of a cluster depend on each other, and counting each as independent makes intervals too narrow. The standard error of
    the returned ones is the linearised one of a mean over clusters of different sizes.
    """
    groups: dict[str, list[float]] = {}
    for value, cluster in zip(values, clusters, strict=True):
        groups.setdefault(cluster, []).append(value)
    if len(groups) == len(values):
        return list(values)
    mean, size = sum(values) / len(values), len(values) / len(groups)
    return [mean + (sum(group) - len(group) * mean) / size for group in groups.values()]


def mean_interval(groups: Sequence[Sequence[float]]) -> ScoreInterval:
    """Return the mean of the group means of scores in [0, 1], with its interval.

    Percentile bootstrap, resampled within each group, or over all scores if no group has any spread or one is a single score.
    If all scores are 0, or all are 1, resampling shows no spread: the interval then has the exact binomial bound
    1 - (alpha/2)^(1/n).
    """
    values = np.concatenate([np.asarray(group, dtype=float) for group in groups])
    bound = 1 - (ALPHA / 2) ** (1 / len(values))
    if (values == 1).all():
        return ScoreInterval(1.0, 1 - bound, 1.0)
    if (values == 0).all():
        return ScoreInterval(0.0, 0.0, bound)
    if len(values) == 1:
        return ScoreInterval(float(values[0]), 0.0, 1.0)
    estimate = _bootstrap(groups)
    return ScoreInterval(estimate.mean, max(0.0, estimate.low), min(1.0, estimate.high))


def paired_difference(groups: Sequence[Sequence[tuple[float, float]]]) -> ScoreInterval:
    """Return the mean of `ours - theirs` over pairs of scores of the same sample, with its interval.

    If all pairs have the same difference, resampling shows no spread. The interval is then widened by 1 - (alpha/2)^(1/n), the
    largest share of different pairs that n equal ones do not exclude.
    """
    estimate = _bootstrap([[ours - theirs for ours, theirs in group] for group in groups])
    if estimate.low < estimate.high:
        return estimate
    bound = 1 - (ALPHA / 2) ** (1 / sum(map(len, groups)))
    return ScoreInterval(estimate.mean, max(-1.0, estimate.mean - bound), min(1.0, estimate.mean + bound))


def standard_error(groups: Sequence[Sequence[float]]) -> float:
    """Return the standard error of the mean of the group means; groups of one value are pooled with all others."""
    groups = _with_variance(groups)
    variances = [float(np.var(group, ddof=1)) / len(group) for group in groups if len(group) > 1]
    return float(np.sqrt(sum(variances))) / len(groups)


def student(freedom: int) -> float:
    """Return the half-width of a 95% interval in standard errors, from Student's distribution."""
    return float(stats.t.ppf(1 - ALPHA / 2, max(1, freedom)))


def change_interval(groups: Sequence[Sequence[float]], answers: int | None = None) -> ScoreInterval:
    """Return the mean of the group means of changes, with Student's interval, which is valid for few samples too.

    Changes of shares need the number of `answers` behind them. If all changes are equal, the interval is widened by
    1 - (alpha/2)^(1/answers), the largest share of different answers that the equal ones do not exclude. For other figures
    a single value has an infinite interval.
    """
    mean = float(np.mean([np.mean(group) for group in groups]))
    pooled = _with_variance(groups)
    freedom = sum(len(group) - 1 for group in pooled)
    error = standard_error(groups)
    if error > 0:
        width = student(freedom) * error
    elif answers is not None:
        width = 1 - (ALPHA / 2) ** (1 / answers)
    else:
        width = 0.0 if freedom else float("inf")
    bound = float("inf") if answers is None else 1.0
    return ScoreInterval(mean, max(-bound, mean - width), min(bound, mean + width))


def _with_variance(groups: Sequence[Sequence[float]]) -> Sequence[Sequence[float]]:
    """Return the groups, or one group with all values if a group has a single value and so no variance."""
    if min(map(len, groups)) > 1:
        return groups
    return [[value for group in groups for value in group]]


def paired_p_value(groups: Sequence[Sequence[tuple[float, float]]]) -> float:
    """Return the two-sided p-value of the mean difference between ours and theirs.

    Permutation test: the two scores of a sample are swapped at random, in all possible ways or in `PERMUTATIONS` of them. Equal
    pairs are left out, because swapping them changes nothing. With many pairs, those of the same absolute difference are drawn
    together: the number of swaps among them is binomial, which takes a hundred times fewer random bits.
    """
    differences = [(ours - theirs) / len(group) for group in groups for ours, theirs in group if ours != theirs]
    if len(differences) < 2:  # swapping a single pair gives a difference of the same size
        return 1.0
    if 2 ** len(differences) <= PERMUTATIONS:
        tested = stats.permutation_test(
            (differences,), np.sum, permutation_type="samples", n_resamples=PERMUTATIONS, vectorized=True, rng=_SEED
        )
        return float(tested.pvalue)
    # Equal fractions may differ in their last digits.
    sizes, place, counts = np.unique(np.abs(differences).round(12), return_inverse=True, return_counts=True)
    more = np.bincount(place, np.sign(differences))
    rng = np.random.default_rng(_SEED)
    test = stats.monte_carlo_test(
        more,
        lambda size: 2.0 * rng.binomial(counts, 0.5, size=size) - counts,
        lambda sums, axis: np.sum(sums * sizes, axis=axis),
        n_resamples=PERMUTATIONS,
        vectorized=True,
    )
    return float(test.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted by Holm (1979): below 0.05, the chance of any false finding among all is below 5%."""
    order = np.argsort(p_values)
    steps = np.asarray(p_values)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return [float(p) for p in adjusted]


def _bootstrap(groups: Sequence[Sequence[float]]) -> ScoreInterval:
    """Resample within groups, or over all scores if a group is a single one, which alone shows no spread.

    The interval does not depend on the order of the scores.
    """
    groups = sorted(sorted(group) for group in groups)
    mean = float(np.mean([np.mean(group) for group in groups]))
    if not any(len(set(group)) > 1 for group in groups):  # all spread lies between the groups
        groups = [sorted(value for group in groups for value in group)]
    ordered = [np.asarray(group) for group in map(sorted, _with_variance(groups))]
    if all((group == group[0]).all() for group in ordered):
        return ScoreInterval(mean, mean, mean)
    interval = stats.bootstrap(
        ordered, _mean_of_means, n_resamples=RESAMPLES, confidence_level=1 - ALPHA, method="percentile", rng=_SEED
    ).confidence_interval
    # A pooled mean weighs groups of different sizes differently.
    shift = 0.0 if len(ordered) > 1 else mean - float(ordered[0].mean())
    return ScoreInterval(mean, shift + float(interval.low), shift + float(interval.high))


def _mean_of_means(*groups: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    return np.mean([group.mean(axis=axis) for group in groups], axis=0)


def better(pairs: Sequence[tuple[float, float]], looks: int = 1, is_last: bool = True) -> bool:
    """Whether the first scores have the larger sum, significantly at one of `looks` looks at growing numbers of pairs.

    Guessing passes one of the looks with a probability of at most `ALPHA`. The last look needs no significance if it has too
    few pairs for any.
    """
    level = 2 * ALPHA / looks  # the p-value counts both directions
    larger = sum(first for first, _ in pairs) > sum(second for _, second in pairs)
    too_few = 0.5 ** (len(pairs) - 1) >= level
    return larger and (is_last if too_few else paired_p_value([pairs]) < level)
