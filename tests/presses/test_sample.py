# SPDX-License-Identifier: Apache-2.0
"""Sampled pairs: their choice, their weights, and an unbiased estimate of the sum of all weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpress
from tests.models import padded_batch, tiny_model, tokens

LENGTH, RATIO = 80, 0.7
KEPT = int(LENGTH * (1 - RATIO))


def compressed(spec: str, family: str = "llama", **more: Any) -> Any:
    model = tiny_model(family)
    with kvpress.get_press(spec)(model) as session:
        model.generate(tokens(2, LENGTH), max_new_tokens=2, do_sample=False, **more)
    return session.cache


def weights(cache: Any, layer: int = 0) -> list[dict[int, float]]:
    """Weight of every kept pair of each stream, by position."""
    dense = cache.layers[layer].store.dense
    logs = torch.zeros(dense.layout.total) if dense.log_weight is None else dense.log_weight.float()
    slots, rows = dense.slots(), [dense.layout.rows(n) for n in range(dense.layout.streams)]
    return [dict(zip(slots[part].tolist(), logs[part].tolist(), strict=True)) for part in rows]


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_best_stay_and_the_rest_of_the_budget_is_drawn_and_weighed(share: float) -> None:
    num_sampled = round(KEPT * share)
    best = weights(compressed(f"knorm:budget={KEPT - num_sampled}")) if num_sampled < KEPT else [{}] * 4
    for all_kept, sure in zip(weights(compressed(f"sample(knorm:{RATIO}):share={share}")), best, strict=True):
        assert len(all_kept) == KEPT
        assert set(sure) <= set(all_kept)
        sampled = {slot: log for slot, log in all_kept.items() if slot not in sure}
        assert len(sampled) == num_sampled
        expected = torch.tensor((LENGTH - KEPT + num_sampled) / max(1, num_sampled)).log().item()
        assert all(log == pytest.approx(expected, abs=2e-3) for log in sampled.values())
        assert all(all_kept[slot] == 0 for slot in sure)


def test_the_sum_of_weights_is_that_of_all_pairs_on_average() -> None:
    """Samples of many seeds together estimate a sum over all pairs."""
    worth = torch.rand(LENGTH, generator=torch.Generator().manual_seed(0)).double()
    estimates = []
    for seed in range(60):
        for stream in weights(compressed(f"sample(knorm:{RATIO}):share=1.0,seed={seed}")):
            slots = torch.tensor(list(stream))
            estimates.append(float((worth[slots] * torch.tensor(list(stream.values())).exp()).sum()))
    spread = torch.tensor(estimates).std() / len(estimates) ** 0.5
    assert abs(sum(estimates) / len(estimates) - float(worth.sum())) < 4 * float(spread)


def test_draws_again_and_again_while_tokens_are_generated_keep_the_sum_on_average() -> None:
    """Random eviction beside a protected prompt: pairs that were sampled before stand for more pairs each time."""
    model, estimates = tiny_model("llama"), []
    for seed in range(8):
        spec = f"decoding(sample(random:seed={seed}):share=1.0,seed={seed}):compression_interval=4,target_size=30"
        with kvpress.get_press(f"protect({spec}):tokens=0:20")(model) as session:
            model.generate(tokens(1, 20), max_new_tokens=33, do_sample=False)
        for layer in range(3):
            for stream in weights(session.cache, layer):
                assert len(stream) == 30
                assert all(stream[at] == 0 for at in range(20))
                estimates.append(float(torch.tensor(list(stream.values())).double().exp().sum()))
    spread = torch.tensor(estimates).std() / len(estimates) ** 0.5
    assert float(spread) > 0
    assert abs(sum(estimates) / len(estimates) - 52) < 4 * float(spread)


def test_a_row_draws_the_same_alone_and_in_a_padded_batch() -> None:
    model, press = tiny_model("llama"), kvpress.get_press("sample(snapkv:0.6,window_size=4)")
    ids, mask = padded_batch([60, 43])
    kept = []
    for batch, attention in ((ids, mask), (ids[1:, -43:], None)):
        with press(model) as session:
            model.generate(batch, attention_mask=attention, max_new_tokens=2, do_sample=False)
        kept.append([[at.tolist() for at in layer[-1]] for layer in kvpress.kept_positions(session.cache)])
    pads = ids.shape[1] - 43
    assert [[[slot - pads for slot in head if slot >= pads] for head in layer] for layer in kept[0]] == kept[1]


def test_weights_live_through_encoding_and_a_copy_by_beams() -> None:
    cache = compressed("sample(knorm:0.5) + rotated:bits=4,residual_length=0", num_beams=2)
    (segment, *_) = cache.layers[0].store.segments
    assert segment.log_weight is not None
    assert segment.log_weight.dtype == torch.float16
    assert int((segment.log_weight > 0).sum()) == segment.layout.streams * round(LENGTH // 2 * 0.25)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("sample(sample(knorm:0.5))", "both weigh"),
        ("chunk(sample(knorm:0.5))", "put SamplePress around ChunkPress"),
        ("block(sample(knorm:0.5))", "put SamplePress around BlockPress"),
        ("sample(knorm:0.5):share=1.5", "share"),
    ],
)
def test_compositions_that_lose_the_weights_are_refused(spec: str, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        kvpress.get_press(spec)
