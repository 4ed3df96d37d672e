# SPDX-License-Identifier: Apache-2.0
"""Verdicts on presses: cases computed by hand, and agreement with scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kvpress_eval.results.stats import ScoreInterval, change_interval, standard_error
from kvpress_eval.results.verdict import Outcome, conclude, judge, nats, points
from scipy import stats

EVEN = [[-1.0] * 10 + [1.0] * 10 + [0.0] * 80]
"""Mean 0, variance 20 / 99, standard error 0.0449."""


def test_the_interval_is_students() -> None:
    values = [0.0, 0.0, -1.0, 0.5]
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    interval = change_interval([values], 4)
    assert (interval.low, interval.high) == pytest.approx((max(-1, expected.low), expected.high))
    assert standard_error([values]) == pytest.approx(stats.sem(values))


def test_groups_have_variances_of_their_own() -> None:
    """Two groups of constant change have no spread within; the difference between them is no noise."""
    groups = [[0.0, 0.2], [-0.4, -0.4, -0.4]]
    assert standard_error(groups) == pytest.approx(math.sqrt(0.02 / 2) / 2)
    interval = change_interval(groups, 5)
    assert interval.mean == pytest.approx(-0.15)
    assert interval.high - interval.mean == pytest.approx(stats.t.ppf(0.975, 3) * 0.05)
    assert standard_error([[0.0], [1.0]]) == standard_error([[0.0, 1.0]]) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("answers", "outcome", "more"), [(3, Outcome.OPEN, 119), (121, Outcome.OPEN, 1), (122, Outcome.HOLDS, 1)]
)
def test_equal_answers_hold_once_they_exclude_the_margin(answers: int, outcome: Outcome, more: int) -> None:
    """Without any difference in n answers, a loss of 3 points is excluded if 0.97^n < 0.025: from 122 answers on."""
    verdict = judge("kivi", 4.0, [[0.0] * answers], points())
    assert (verdict.outcome, verdict.more) == (outcome, more)
    assert verdict.change.low == pytest.approx(0.025 ** (1 / answers) - 1)


def test_too_few_samples_give_their_number() -> None:
    """The deviation is 0.449, and 1.963 x 0.449 / sqrt(n) falls below 0.03 from n = 865 on."""
    verdict = judge("kivi:bits=4", 9.1, EVEN, points())
    widths = [stats.t.ppf(0.975, n - 1) * math.sqrt(20 / 99 / n) for n in (864, 865)]
    assert widths[1] < 0.03 < widths[0]
    assert verdict.more == 865 - 100
    assert verdict.sentence() == (
        "kivi:bits=4: 9.1 times smaller; too few samples to tell whether it loses at most 3 points "
        "(95% interval -8.9 to +8.9, 100 samples): about 765 more"
    )
    enough = judge("kivi:bits=4", 9.1, [EVEN[0] * 9], points())
    assert enough.sentence() == (
        "kivi:bits=4: 9.1 times smaller; loses at most 3 points (95% interval -2.9 to +2.9, 900 samples)"
    )
    assert judge("kivi", 9.1, EVEN, points(10)).outcome is Outcome.HOLDS


def test_a_loss_beyond_the_margin_is_one() -> None:
    verdict = judge("snapkv:0.5", 2.0, [[-1.0, 0.0] * 20], points())
    assert verdict.outcome is Outcome.LOSES
    assert verdict.phrase("questions").startswith("loses more than 3 points (95% interval -66.2 to -33.8, 40 questions")
    assert judge("a", 2.0, [[-1.0]], points()).outcome is Outcome.OPEN
    assert judge("a", 2.0, [[-1.0] * 2], points()).outcome is Outcome.LOSES


def test_a_mean_on_the_margin_is_never_decided() -> None:
    verdict = judge("a", 2.0, [[-0.06, 0.0]], points())
    assert verdict.more is None
    assert verdict.phrase().endswith("no number of samples can")


def test_likelihoods_have_a_margin_in_nats() -> None:
    verdict = judge("a", 9.1, [[-0.02, -0.04, -0.02, -0.04]], nats())
    assert verdict.outcome is Outcome.HOLDS
    assert verdict.phrase("contexts") == "loses at most 0.05 nats (95% interval -0.048 to -0.012, 4 contexts)"
    assert judge("a", 9.1, [[0.0]], nats()).outcome is Outcome.OPEN
    assert judge("a", 9.1, [[0.0, 0.0]], nats()).outcome is Outcome.HOLDS


def test_answers_of_one_context_are_one_sample() -> None:
    """Six answers that fail together are no six samples: only the means of contexts vary independently."""
    contexts = [-1.0] + [0.0] * 9
    clustered = judge("a", 2.0, [contexts], points(), answers=60)
    single = judge("a", 2.0, [np.repeat(contexts, 6).tolist()], points())
    assert clustered.samples == single.samples == 60
    assert clustered.change.low < single.change.low
    assert clustered.more is not None
    assert clustered.more % 6 == 0


def test_the_smallest_press_that_holds_is_named() -> None:
    same = [[0.0] * 200]
    holds, larger = judge("b", 9.1, same, points()), judge("a", 2.0, same, points())
    open_, lossy = judge("c", 20.0, EVEN, points()), judge("d", 50.0, [[-1.0, -0.9] * 9], points())
    full = ScoreInterval(0.9, 0.8, 1.0)
    text = conclude([larger, holds, open_, lossy], full)
    assert text.startswith(
        "Smallest cache that loses at most 3 points: b: 9.1 times smaller; loses at most 3 points (95%"
    )
    assert "Smaller still: c: 20.0 times smaller; too few samples to tell" in text
    assert conclude([open_, lossy], full).startswith("No verdict: c: 20.0 times smaller; too few samples to tell")
    assert conclude([lossy], full, noun="questions") == (
        "Every press that holds less loses more than 3 points here (95% interval, 18 questions)."
    )


@pytest.mark.parametrize(("baseline", "chance"), [((0.0, 0.0, 0.3), 0.0), ((0.3, 0.2, 0.4), 0.25)])
def test_a_baseline_at_chance_ranks_nothing(baseline: tuple[float, float, float], chance: float) -> None:
    text = conclude([judge("a", 2.0, [[0.0] * 200], points())], ScoreInterval(*baseline), chance)
    assert text.startswith(f"No ranking: the full cache answers {100 * baseline[0]:.1f}%")
    assert f"chance ({100 * chance:.0f}%)" in text
