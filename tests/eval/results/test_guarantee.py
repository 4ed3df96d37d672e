# SPDX-License-Identifier: Apache-2.0
"""A guarantee is rarely wrong whatever the losses are, and is given where the samples suffice."""

from __future__ import annotations

import math

import numpy as np
import pytest
from kvpress_eval.results.guarantee import guarantee_of, guarantees, least_contexts, log_wealth
from kvpress_eval.results.verdict import points


def at_the_margin(kind: str, size: tuple[int, int], margin: float) -> np.ndarray:
    """Losses whose mean is the margin."""
    random = np.random.default_rng(0)
    if kind == "answers":
        return (random.random(size) < margin).astype(float)
    if kind == "answers won and lost":
        return random.choice([-1.0, 0.0, 1.0], size, p=[0.1, 0.8 - margin, 0.1 + margin])
    if kind == "rare":
        return np.where(random.random(size) < 0.5 * margin, 1.0, margin * 0.5 / (1 - 0.5 * margin))
    return np.clip(random.normal(margin, 0.2, size), margin - 0.5, margin + 0.5)


@pytest.mark.parametrize("kind", ["answers", "answers won and lost", "rare", "graded"])
@pytest.mark.parametrize("margin", [0.03, 0.1])
@pytest.mark.parametrize("contexts", [40, 200])
def test_a_press_that_loses_the_margin_passes_with_at_most_the_allowed_probability(
    kind: str, margin: float, contexts: int
) -> None:
    losses = at_the_margin(kind, (2000, contexts), margin)
    passed = np.mean([log_wealth(row, margin) >= math.log(20) for row in losses])
    assert passed <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)


@pytest.mark.parametrize(("size", "confidence"), [(5.0, 0.95), (3.0, 0.95), (5.0, 0.9), (20.0, 0.99)])
def test_the_least_contexts_are_those_without_a_loss(size: float, confidence: float) -> None:
    margin, least = points(size), least_contexts(points(size), confidence)
    assert guarantee_of("a", {"task": [0.0] * least}, margin, confidence).holds
    assert not guarantee_of("a", {"task": [0.0] * (least - 1)}, margin, confidence).holds
    # An exact binomial test of no failure needs log(1 - confidence) / log(1 - margin) contexts.
    assert 1 <= least / (math.log(1 - confidence) / math.log(1 - margin.loss)) < 1.5


def test_small_losses_need_more_contexts_and_large_ones_get_no_number() -> None:
    few = guarantee_of("a", {"task": [1.0] + [0.0] * 79}, points(5), 0.95)
    assert not few.holds
    assert few.needed is not None
    assert few.needed > 80
    assert guarantee_of("a", {"task": ([1.0] + [0.0] * 79) * math.ceil(few.needed / 80)}, points(5), 0.95).holds
    assert f"80 held-out contexts of each task are too few; about {few.needed} would tell" in few.phrase()
    lost = guarantee_of("a", {"task": [1.0] * 10 + [0.0] * 70}, points(5), 0.95)
    assert (lost.holds, lost.needed) == (False, None)
    assert "speak against it" in lost.phrase()


def test_every_task_must_pass() -> None:
    good, bad = [0.0] * 100, [1.0] * 10 + [0.0] * 90
    assert guarantee_of("a", {"one": good, "two": good}, points(5), 0.95).holds
    assert not guarantee_of("a", {"one": good, "two": bad}, points(5), 0.95).holds
    short = guarantee_of("a", {"one": good, "two": good[:60]}, points(5), 0.95)
    assert (short.holds, short.contexts) == (False, 60)


def test_chains_share_the_error_and_stop_at_the_first_that_fails() -> None:
    good, bad = {"task": [0.0] * 100}, {"task": [1.0] * 10 + [0.0] * 90}
    (only,) = guarantees([[("a", good), ("b", good), ("c", bad), ("d", good)]], points(5), 0.95)
    assert [(guarantee.press, guarantee.holds) for guarantee in only] == [("a", True), ("b", True), ("c", False)]
    enough, short = {"task": [0.0] * 104}, {"task": [0.0] * 90}
    shared = guarantees([[("a", bad)], [("b", enough)], [("c", short)]], points(5), 0.95)
    assert [chain[0].holds for chain in shared] == [False, True, False]
    assert guarantee_of("c", short, points(5), 0.95).holds
    assert least_contexts(points(5), 0.95, shares=3) == shared[2][0].needed


def test_the_chance_that_any_press_passes_wrongly_is_bounded() -> None:
    losses = at_the_margin("answers", (3 * 2000, 200), 0.1)
    by_trial = losses.reshape(2000, 3, 200)
    wrong = [
        any(chain[0].holds for chain in guarantees([[("a", {"t": row})] for row in trial], points(10), 0.95))
        for trial in by_trial
    ]
    assert np.mean(wrong) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)
