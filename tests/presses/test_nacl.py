# SPDX-License-Identifier: Apache-2.0
"""NACL: the best pairs by the attention of proxies, and draws without replacement, against the model's own attention."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

import kvpress
from tests.caches import prefill
from tests.models import full_layers, padded_batch, tiny_model, tokens

LENGTH, WINDOW, SINKS, KEPT = 60, 6, 3, 30
FREE = KEPT - WINDOW - SINKS
"""Pairs that stay beside window and sinks."""


def kept(spec: str, ids: Tensor, family: str = "llama", mask: Tensor | None = None) -> list[list[list[Tensor]]]:
    cache = prefill(tiny_model(family), kvpress.get_press(spec), ids, mask)
    return kvpress.kept_positions(cache)


def attention_sums(ids: Tensor, family: str) -> list[Tensor]:
    """Attention of the last tokens on each other token, mean over the group, `[B, H, T]` of every layer, from eager weights."""
    attentions = tiny_model(family, "eager")(ids, output_attentions=True).attentions
    return [layer[:, :, -WINDOW:].sum(dim=2).view(len(ids), 2, -1, ids.shape[1]).mean(dim=2) for layer in attentions]


def press(share: float, temperature: float = 1.0, seed: int = 0) -> str:
    return f"nacl:budget={KEPT},window_size={WINDOW},n_sink={SINKS},random_share={share},temperature={temperature},seed={seed}"


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3"])
def test_window_sinks_and_the_best_stay_and_the_rest_is_drawn(family: str, share: float) -> None:
    ids = tokens(2, LENGTH)
    positions, sums = kept(press(share), ids, family), attention_sums(ids, family)
    always = {*range(SINKS), *range(LENGTH - WINDOW, LENGTH)}
    num_best = FREE - round(share * FREE)
    for layer in full_layers(tiny_model(family)):
        for row in range(2):
            for head in range(2):
                older = sums[layer][row, head, SINKS : LENGTH - WINDOW]
                best = {SINKS + index for index in older.topk(num_best).indices.tolist()}
                stays = set(positions[layer][row][head].tolist())
                assert len(stays) == KEPT
                assert always | best <= stays
                assert (stays == always | best) == (share == 0)


def test_a_low_temperature_draws_the_best() -> None:
    ids = tokens(1, LENGTH)
    greedy, cold = kept(press(0.0), ids), kept(press(1.0, temperature=1e-6), ids)
    for layer, other in zip(greedy, cold, strict=True):
        for head, other_head in zip(layer[0], other[0], strict=True):
            assert torch.equal(head, other_head)


def test_draws_follow_the_softmax_of_the_attention() -> None:
    """With one drawn pair, each pair is as frequent over many seeds as its probability."""
    ids, temperature = tokens(1, LENGTH), 0.5
    sums = attention_sums(ids, "llama")
    shape = f"window_size={WINDOW},n_sink={SINKS},random_share=1.0,temperature={temperature}"
    counts: list[Counter[int]] = [Counter() for _ in range(6)]
    for seed in range(300):
        positions = kept(f"nacl:budget={WINDOW + SINKS + 1},{shape},seed={seed}", ids)
        for n, counter in enumerate(counts):
            (drawn,) = set(positions[n // 2][0][n % 2].tolist()) - {
                *range(SINKS),
                *range(LENGTH - WINDOW, LENGTH),
            }
            counter[drawn] += 1
    for n, counter in enumerate(counts):
        expected = torch.softmax(sums[n // 2][0, n % 2, SINKS : LENGTH - WINDOW] / temperature, dim=0)
        actual = torch.tensor([counter[SINKS + index] / 300 for index in range(len(expected))])
        error = (expected * (1 - expected) / 300).sqrt()
        assert float(((actual - expected).abs() / error).max()) < 5


def test_draws_depend_on_seed_layer_and_head_only() -> None:
    ids = tokens(2, LENGTH)
    first, again, other = (kept(press(1.0, 1e6, seed), ids) for seed in (1, 1, 2))
    for layer in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first[layer][0], again[layer][0], strict=True))
        assert not torch.equal(first[layer][0][0], other[layer][0][0])
        assert torch.equal(first[layer][0][0], first[layer][1][0])  # attention hardly counts at this temperature
        assert not torch.equal(first[layer][0][0], first[layer][0][1])
    assert not torch.equal(first[0][0][0], first[1][0][0])


def test_a_row_keeps_the_same_pairs_alone_and_padded() -> None:
    ids, mask = padded_batch([LENGTH, 41])
    spec = "nacl:0.4,window_size=4,n_sink=2,temperature=0.1"
    padded, alone = kept(spec, ids, mask=mask), kept(spec, ids[1:, -41:])
    for layer, other in zip(padded, alone, strict=True):
        for head, other_head in zip(layer[1], other[0], strict=True):
            assert torch.equal(head[head >= LENGTH - 41] - (LENGTH - 41), other_head)


def test_short_prompts_lose_nothing_and_budgets_below_the_window_keep_the_newest() -> None:
    assert len(kept("nacl:0.5,window_size=8,n_sink=2", tokens(1, 10))[0][0][0]) == 10
    positions = kept("nacl:budget=5,window_size=8,n_sink=2", tokens(1, 40))
    assert positions[0][0][0].tolist() == list(range(35, 40))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("random_share=1.5", r"random_share must be in \[0, 1\], got 1.5"),
        ("temperature=0", "temperature must be > 0, got 0"),
        ("n_sink=-1", "n_sink must be >= 0, got -1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        kvpress.get_press(f"nacl:0.5,{settings}")


@pytest.mark.parametrize("spec", ["adakv(nacl:0.5)", "chunkkv(nacl:0.5)", "criticalkv(nacl:0.5)"])
def test_wrappers_that_choose_pairs_are_refused(spec: str) -> None:
    with pytest.raises(TypeError, match="both choose the pairs to keep"):
        kvpress.get_press(spec)
