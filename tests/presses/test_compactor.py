# SPDX-License-Identifier: Apache-2.0
"""Compactor against its two terms, each tested on its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress import CompactorPress
from kvpress.presses.leverage_score import leverage
from tests.caches import prefill
from tests.models import tiny_model, tokens
from tests.presses.scoring import one_view
from tests.presses.test_non_causal_attn import SIZE, brute_force


def z(scores: Tensor) -> Tensor:
    scores = scores.double()
    return torch.stack([(row - row.mean()) / row.std(unbiased=False) for row in scores])


@pytest.mark.parametrize(
    ("arguments", "weight"),
    [
        ({"compression_ratio": 0.75}, 0.75),
        ({"compression_ratio": 0.75, "blending": 0.2}, 0.2),
        ({"compression_ratio": 0.75, "blending": 0.0}, 0.0),
        ({"budget": 10}, 0.75),
        ({"compression_ratio": 0.75, "scale": 1.0}, 0.75),
    ],
)
def test_the_two_terms_between_the_sinks_are_standardised_and_blended(arguments: dict[str, Any], weight: float) -> None:
    model, ids = tiny_model("llama"), tokens(1, 40)
    press = CompactorPress(**arguments, sink_size_start=3, sink_size_end=2, chunk_size=SIZE)
    view, scores = one_view(model, press, ids)
    between = view.pairs(torch.arange(3, 38).expand(*view.shape[:2], -1))
    received = brute_force(model, ids, press.scale, slice(3, 38))[view.call.layer.index]
    expected = weight * z(leverage(between, 48)) + z(received[None])
    torch.testing.assert_close(scores[..., 3:-2].double(), expected, atol=1e-4, rtol=1e-4)
    ends = torch.cat([scores[..., :3], scores[..., -2:]], dim=2)
    assert bool(ends.isposinf().all())


def test_the_defaults_are_those_of_the_peer() -> None:
    assert CompactorPress(0.5) == CompactorPress(0.5, 8, 4, 256, 48, None)


def test_ends_are_kept_and_short_prompts_left_whole() -> None:
    model = tiny_model("llama")
    cache = prefill(model, CompactorPress(0.5), tokens(1, 40))
    for layer in kvpress.kept_positions(cache):
        for head in layer[0]:
            assert len(head) == 20
            assert {*range(8), *range(36, 40)} <= set(head.tolist())
    short_cache = prefill(model, CompactorPress(0.5), tokens(1, 12))
    assert kvpress.memory_report(short_cache).kept == kvpress.memory_report(short_cache).seen


def test_inside_a_decoding_schedule_the_ends_stay() -> None:
    model = tiny_model("llama")
    press = kvpress.DecodingPress(CompactorPress(sink_size_start=2), compression_interval=4, target_size=16)
    with press(model) as session:
        model.generate(tokens(1, 21), max_new_tokens=5, do_sample=False)
    for layer in kvpress.kept_positions(session.cache):
        for head in layer[0]:
            assert len(head) == 16
            assert {0, 1, 21, 22, 23, 24} <= set(head.tolist())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sink_size_start": -1}, "sink_size_start must be >= 0"),
        ({"sink_size_end": -1}, "sink_size_end must be >= 0"),
        ({"chunk_size": 0}, "chunk_size must be >= 1"),
        ({"sketch_dimension": 0}, "sketch_dimension must be >= 1"),
        ({"blending": -0.5}, "blending must be >= 0, got -0.5"),
    ],
)
def test_configuration(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CompactorPress(**arguments)


def test_ends_that_an_earlier_press_took_from_some_heads() -> None:
    model = tiny_model("llama")
    press = kvpress.KnormPress(0.5) + CompactorPress(0.5, sink_size_start=6, sink_size_end=4, chunk_size=8)
    kept = kvpress.kept_positions(prefill(model, press, tokens(1, 40)))
    assert {len(head) for layer in kept for head in layer[0]} == {10}


def test_ends_that_an_earlier_press_took_from_some_rows() -> None:
    model, ids = tiny_model("llama"), tokens(4, 40)
    press = kvpress.KnormPress(0.5) + CompactorPress(0.5, sink_size_start=6, sink_size_end=4, chunk_size=8)
    together = kvpress.kept_positions(prefill(model, press, ids))
    for row in range(len(ids)):
        alone = kvpress.kept_positions(prefill(model, press, ids[row : row + 1]))
        for layer, layer_alone in zip(together, alone, strict=True):
            assert [list(head) for head in layer[row]] == [list(head) for head in layer_alone[0]]
