# SPDX-License-Identifier: Apache-2.0
"""Anomalies of keys at three scales, against loops over single keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress import NestedKVPress
from kvpress.presses.nestedkv import block_means, trailing_means
from tests.models import tiny_model, tokens
from tests.presses.scoring import one_view


def anomaly(key: Tensor, others: Tensor) -> float:
    return 1 - float(torch.dot(key, others.mean(dim=0)) / (key.norm() * others.mean(dim=0).norm()))


def by_loops(keys: Tensor, press: NestedKVPress) -> list[float]:
    """Return the scores of the keys `[n, D]` of one head."""
    n, block, width = len(keys), press.block_size, press.window_size
    scales = [
        [anomaly(keys[t], keys) for t in range(n)],
        [anomaly(keys[t], keys[t // block * block : (t // block + 1) * block]) for t in range(n)],
        [anomaly(keys[t], keys[max(0, t - width + 1) : t + 1]) for t in range(n)],
    ]
    spreads = [float(torch.tensor(scale).std(correction=0)) for scale in scales]
    weights = [math.exp(press.beta * spread / max(spreads)) for spread in spreads]
    placed = [[(1 + sum(other < value for other in scale)) / n for value in scale] for scale in scales]
    scores = []
    for t in range(n):
        column = [scale[t] for scale in placed]
        mixed = sum(w * r for w, r in zip(weights, column, strict=True)) / sum(weights)
        switch = 1 / (1 + math.exp(-press.kappa * (max(column) - mixed - press.tau)))
        scores.append((1 - switch) * mixed + switch * max(column))
    return scores


@pytest.mark.parametrize("settings", [{}, {"beta": 0.0, "tau": 0.1}, {"kappa": 0.0}])
def test_scores_are_those_of_loops(settings: dict[str, float]) -> None:
    press = NestedKVPress(0.5, block_size=7, window_size=3, **settings)
    view, scores = one_view(tiny_model("llama"), press, tokens(1, 33))
    for head in range(2):
        expected = torch.tensor(by_loops(view.keys[0, head].double(), press))
        # The first key is its own window, so its anomaly there is 0 up to rounding, as is its rank.
        torch.testing.assert_close(scores[0, head], expected, atol=1e-5, rtol=0)


def test_a_key_that_is_unusual_in_its_block_alone_is_found() -> None:
    """Two topics fill a block each: a key of the first among those of the second is usual in the prompt."""
    generator = torch.Generator().manual_seed(0)
    topics = torch.eye(2, 16)[[0] * 16 + [1] * 16] + 0.05 * torch.randn(32, 16, generator=generator)
    topics[24] = topics[3]
    placed = {}
    for block in (16, 32):
        means = block_means(topics[None, None], (torch.arange(32) // block)[None, None])[0, 0]
        away = 1 - torch.cosine_similarity(topics, means, dim=-1)
        placed[block] = int((away > away[24]).sum())
    assert placed[16] == 0
    assert placed[32] > 5


def test_means() -> None:
    keys = torch.randn(2, 3, 11, 4, generator=torch.Generator().manual_seed(1))
    trailing = trailing_means(keys, 4)
    for t in range(11):
        torch.testing.assert_close(trailing[:, :, t], keys[:, :, max(0, t - 3) : t + 1].mean(dim=2))
    block = torch.tensor([0, 0, 1, 1, 1, 3, 3, 3, 3, 3, 3]).expand(2, 3, -1)
    means = block_means(keys, block)
    torch.testing.assert_close(means[:, :, 3], keys[:, :, 2:5].mean(dim=2))
    torch.testing.assert_close(means[:, :, 10], keys[:, :, 5:].mean(dim=2))


def test_configuration() -> None:
    for name in ("block_size", "window_size"):
        with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
            NestedKVPress(0.5, **{name: 0})
    with pytest.raises(ValueError, match="tau must be"):
        NestedKVPress(0.5, tau=1.5)
    assert kvpress.get_press("nestedkv:0.5,tau=0.4") == NestedKVPress(0.5, tau=0.4)
