# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from kvpress_eval.results.stats import (
    PERMUTATIONS,
    better,
    holm,
    mean_interval,
    paired_difference,
    paired_p_value,
    pool,
)
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


def test_one_sample_gives_the_widest_interval() -> None:
    estimate = mean_interval([[0.5]])
    assert (estimate.mean, estimate.low, estimate.high) == (0.5, 0.0, 1.0)


def test_groups_without_spread_are_resampled_together() -> None:
    estimate = mean_interval([[1.0] * 8, [0.0] * 8])
    assert estimate.mean == 0.5
    assert estimate.low < 0.4 < 0.6 < estimate.high


def test_groups_of_one_sample_are_not_certain() -> None:
    """A run with one sample for each of several tasks: the spread lies between the tasks, as for one group of all."""
    scores = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    pairs = [[(score, 1.0)] for score in scores]
    together = paired_difference([[pair for group in pairs for pair in group]])
    assert paired_difference(pairs) == together
    assert together.low < -1 / 3 < together.high
    assert mean_interval([[score] for score in scores]) == mean_interval([scores])
    mixed = paired_difference([[(1.0, 1.0)] * 5, *pairs])
    assert mixed.mean == pytest.approx(-2 / 7)
    assert mixed.low < mixed.mean - 0.1 < mixed.mean + 0.1 < mixed.high
    apart = paired_difference([[(1.0, 1.0)] * 4, [(0.0, 1.0)] * 4])
    assert apart.low < apart.mean - 0.1 < -0.5 + 0.1 < apart.high
    wide = mean_interval([[0.0], [1.0, 1.0, 0.0]])
    assert wide.mean == pytest.approx(1 / 3)
    assert 0 == wide.low < wide.mean < wide.high <= 1


def test_every_group_counts_alike() -> None:
    assert mean_interval([[1.0, 0.0], [1.0] * 98 + [0.0] * 2]).mean == pytest.approx(0.74)


def test_pairing_removes_common_variation() -> None:
    base = np.random.default_rng(0).integers(2, size=100).astype(float)
    worse = base.copy()
    worse[np.flatnonzero(base)[:5]] = 0
    estimate = paired_difference([list(zip(worse.tolist(), base.tolist(), strict=True))])
    assert estimate.mean == pytest.approx(-0.05)
    assert estimate.high < 0
    assert estimate.high - estimate.low < 0.1
    same = paired_difference([[(1.0, 1.0), (0.0, 0.0)]])
    assert same.mean == 0
    assert -same.low == same.high == pytest.approx(1 - 0.025 ** (1 / 2))


def test_p_values_count_all_exchanges() -> None:
    """All ways to exchange the pairs of two groups of different size, one by one."""
    groups = [[(1.0, 0.0), (0.5, 0.25), (1.0, 1.0)], [(0.0, 1.0), (1.0, 0.5), (1.0, 0.0), (1.0, 0.25)]]
    weighted = [(ours - theirs) / len(group) for group in groups for ours, theirs in group]
    sums = [abs(np.dot(signs, weighted)) for signs in product((-1, 1), repeat=len(weighted))]
    expected = np.mean([total >= abs(sum(weighted)) - 1e-12 for total in sums])
    assert paired_p_value(groups) == pytest.approx(expected)


def test_p_values_of_many_pairs() -> None:
    rng = np.random.default_rng(0)
    worse = [(float(rng.random() < 0.3), 1.0) for _ in range(50)]
    assert paired_p_value([worse]) == pytest.approx(1 / PERMUTATIONS, abs=2 / PERMUTATIONS)
    signs = rng.integers(2, size=100)
    even = [(float(up), float(1 - up)) for up in signs]
    exact = scipy_stats.binomtest(int(signs.sum()), len(signs)).pvalue
    assert paired_p_value([even]) == pytest.approx(exact, abs=0.02)


def test_p_values_agree_with_scipy() -> None:
    rng = np.random.default_rng(3)
    for pairs in (8, 60):
        ours, theirs = rng.random(pairs), rng.random(pairs) + 0.1
        expected = scipy_stats.permutation_test(
            (ours, theirs), lambda x, y, axis: np.mean(x - y, axis=axis), permutation_type="samples", rng=0,
            vectorized=True, n_resamples=100_000,
        ).pvalue  # fmt: skip
        got = paired_p_value([list(zip(ours.tolist(), theirs.tolist(), strict=True))])
        assert got == pytest.approx(expected, abs=1e-12 if pairs == 8 else 0.015)  # three standard errors


def test_few_pairs_prove_nothing() -> None:
    assert paired_p_value([[(1.0, 1.0), (0.0, 0.0)]]) == 1
    assert paired_p_value([[(0.0, 1.0), (1.0, 1.0)]]) == 1
    assert paired_p_value([[(0.0, 1.0)] * 3]) == 0.25


def test_holm_agrees_with_the_definition() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.6]) == [1, 1]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_intervals_do_not_depend_on_the_order() -> None:
    groups = [[1.0, 0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0, 0.0], [0.5, 1.0, 0.0, 0.0, 1.0]]
    turned = [group[::-1] for group in groups[::-1]]
    interval, interval_of_turned = mean_interval(groups), mean_interval(turned)
    assert (interval.low, interval.high) == (interval_of_turned.low, interval_of_turned.high)
    pairs = [[(score, 0.25) for score in group] for group in groups]
    interval_of_turned = paired_difference([group_pairs[::-1] for group_pairs in pairs[::-1]])
    assert (interval_of_turned.low, interval_of_turned.high) == (
        paired_difference(pairs).low,
        paired_difference(pairs).high,
    )


def test_few_equal_pairs_are_not_certain() -> None:
    for count in (1, 2, 40):
        estimate = paired_difference([[(1.0, 1.0)] * count])
        assert estimate.mean == 0.0
        assert -estimate.low == estimate.high == pytest.approx(1 - 0.025 ** (1 / count))
        assert paired_difference([[(1.0, 1.0)]] * count) == estimate
    assert paired_difference([[(0.0, 1.0)] * 3]).low == -1.0


@pytest.mark.parametrize("chance", [0.1, 0.5])
def test_guesses_are_rarely_better(chance: float) -> None:
    """Pairs of guesses are looked at again and again, as `tune` does, which must not let more than 5% of them pass."""
    rng, looks, passed = np.random.default_rng(0), (2, 4, 8, 16, 32), 0
    for _ in range(100):
        scores = (rng.random((32, 2)) < chance).astype(float).tolist()
        pairs = [(ours, theirs) for ours, theirs in scores]
        passed += any(better(pairs[:count], len(looks), is_last=count == looks[-1]) for count in looks)
    assert passed <= 9  # of 100; the binomial limit at 5%


def test_few_right_answers_are_better() -> None:
    assert better([(1.0, 0.0)] * 2)
    assert not better([(1.0, 0.0)] * 2, looks=5, is_last=False)
    assert better([(1.0, 0.0)] * 8, looks=5, is_last=False)
    assert not better([(0.0, 0.0)] * 8)
    assert not better([(1.0, 0.0), *[(0.0, 0.0)] * 20])


def test_answers_about_one_document_are_not_independent() -> None:
    """20 documents with 5 equal answers each tell as much as 20 answers; of different sizes, as the linearised error says."""
    scores = [float(number % 3 > 0) for number in range(20)]
    values = [score for score in scores for _ in range(5)]
    clusters = [f"document {number // 5}" for number in range(100)]
    assert pool(values, clusters) == pytest.approx(scores)
    assert pool(scores, clusters[::5]) == scores
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 9, size=400)
    means = []
    for _ in range(300):
        chances = rng.random(400).repeat(sizes)
        drawn = (rng.random(len(chances)) < chances).astype(float)
        pooled = pool(drawn.tolist(), np.arange(400).repeat(sizes).astype(str).tolist())
        assert np.mean(pooled) == pytest.approx(drawn.mean())
        means.append(drawn.mean())
    error = np.std(pooled, ddof=1) / np.sqrt(400)
    assert error == pytest.approx(np.std(means), rel=0.15)
    assert np.std(drawn, ddof=1) / np.sqrt(len(drawn)) < 0.8 * error
    assert pool([1.0] * 3, ["a", "a", "b"]) == [1.0, 1.0]
