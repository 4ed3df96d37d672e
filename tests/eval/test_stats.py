from __future__ import annotations

import numpy as np
import pytest
from kvpress_eval.stats import mean_interval, paired_difference
from scipy import stats as scipy_stats


def test_agrees_with_scipy() -> None:
    scores = np.random.default_rng(1).integers(2, size=80).astype(float)
    ours = mean_interval([scores.tolist()])
    theirs = scipy_stats.bootstrap((scores,), np.mean, method="percentile", n_resamples=5000, rng=0)
    assert ours.mean == scores.mean()
    assert ours.low == pytest.approx(theirs.confidence_interval.low, abs=0.02)
    assert ours.high == pytest.approx(theirs.confidence_interval.high, abs=0.02)


def test_golden_values() -> None:
    estimate = mean_interval([[1.0] * 30 + [0.0] * 10, [0.5] * 20 + [1.0] * 20])
    assert estimate.mean == 0.75
    assert (estimate.low, estimate.high) == pytest.approx((0.675, 0.825), abs=0.013)
    assert mean_interval([[1.0] * 30 + [0.0] * 10]) == mean_interval([[1.0] * 30 + [0.0] * 10])


@pytest.mark.parametrize("n", [1, 10, 300])
def test_all_right_or_all_wrong_is_the_exact_binomial_bound(n: int) -> None:
    right, wrong = mean_interval([[1.0] * n]), mean_interval([[0.0] * n])
    bound = scipy_stats.binomtest(n, n).proportion_ci(0.95, method="exact")
    assert (right.mean, right.high) == (1.0, 1.0)
    assert right.low == pytest.approx(bound.low)
    assert (wrong.mean, wrong.low) == (0.0, 0.0)
    assert wrong.high == pytest.approx(1 - bound.low)


def test_one_sample_says_nothing() -> None:
    estimate = mean_interval([[0.5]])
    assert (estimate.mean, estimate.low, estimate.high) == (0.5, 0.0, 1.0)


def test_groups_without_spread_are_resampled_together() -> None:
    estimate = mean_interval([[1.0] * 8, [0.0] * 8])
    assert estimate.mean == 0.5
    assert estimate.low < 0.4 < 0.6 < estimate.high


def test_every_group_counts_alike() -> None:
    assert mean_interval([[1.0, 0.0], [1.0] * 98 + [0.0] * 2]).mean == pytest.approx(0.74)


def test_pairing_removes_what_is_common() -> None:
    base = np.random.default_rng(0).integers(2, size=100).astype(float)
    worse = base.copy()
    worse[np.flatnonzero(base)[:5]] = 0
    estimate = paired_difference([list(zip(worse.tolist(), base.tolist(), strict=True))])
    assert estimate.mean == pytest.approx(-0.05)
    assert estimate.high < 0
    assert estimate.high - estimate.low < 0.1
    same = paired_difference([[(1.0, 1.0), (0.0, 0.0)]])
    assert (same.mean, same.low, same.high) == (0, 0, 0)
