# SPDX-License-Identifier: Apache-2.0
"""Attention within chunks, against a loop over chunks and heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.observe.call import LayerCall
from kvpress.presses.non_causal_attn import ChunkMass
from tests.models import full_layers, padded_batch, tiny_model, tokens
from tests.presses.scoring import Recorded, one_view, scored
from tests.probes import Watching

SIZE = 8


def rotated_queries(model: Any, ids: Tensor) -> dict[int, Any]:
    """Queries `[Hq, n, D]` of one row as attention gets them, and how it forms logits, by layer."""
    by_layer = {}

    def look(call: LayerCall) -> None:
        by_layer[call.layer.module.layer_idx] = (call.queries[0], call.logits, call.sinks)

    with Watching(look)(model):
        model(ids, use_cache=True)
    return by_layer


def brute_force(model: Any, ids: Tensor, scale: float | None = None, between: slice = slice(None)) -> dict[int, Tensor]:
    """Scores `[H, n]` of one row by layer, in float64; chunks and neighbours are those of the tokens `between`."""
    stock = model(ids, use_cache=True).past_key_values
    result = {}
    for layer, (queries, logits, sinks) in rotated_queries(model, ids).items():
        keys, values = stock.layers[layer].keys[0].double(), stock.layers[layer].values[0].double()
        mass = torch.zeros(keys.shape[:2], dtype=torch.float64)
        groups = len(queries) // len(keys)
        for head, query in enumerate(queries.double()):
            for start in range(between.start or 0, ids.shape[1], SIZE):
                part = slice(start, start + SIZE)
                scores = query[part] @ keys[head // groups, part].T * (scale or logits.scale)
                if logits.softcap is not None:
                    scores = logits.softcap * torch.tanh(scores / logits.softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].double().expand(len(scores), 1)], dim=1)
                weights = torch.softmax(scores, dim=1)[:, : len(scores)]
                mass[head // groups, part] += weights.sum(dim=0) / groups
        weighted = (mass * values.norm(dim=-1))[:, between]
        smooth = [weighted[:, max(0, t - 1) : t + 2].mean(dim=1) for t in range(weighted.shape[1])]
        result[layer] = torch.stack(smooth, dim=1)
    return result


@pytest.mark.parametrize("chunk", [None, 1, 7, 16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma2", "gpt_oss", "granite"])
def test_every_chunk_is_read_in_both_directions(
    family: str, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two chunks of one row, or half of the queries of a chunk, at a time.
    monkeypatch.setattr(
        "kvpress.cache.attention.BLOCK_BYTES", 4 * 4 * SIZE * SIZE * 2 if chunk is None else 4 * 2 * SIZE * SIZE
    )
    model = tiny_model(family, "eager")
    ids, mask = padded_batch([37, 21])
    views_by_layer = scored(
        model, kvpress.NonCausalAttnPress(0.5, chunk_size=SIZE), ids, mask, prefill_chunk_size=chunk
    )
    for row, length in enumerate((37, 21)):
        expected = brute_force(model, ids[row : row + 1, -length:])
        assert list(expected) == full_layers(model)
        for layer, scores in zip(expected.values(), views_by_layer.values(), strict=True):
            actual = next(view_scores[view.rows.index(row)] for view, view_scores in scores if row in view.rows)
            torch.testing.assert_close(actual.double(), layer, atol=1e-4, rtol=1e-4)


def test_a_query_is_spread_over_its_chunk_once() -> None:
    view, _ = one_view(tiny_model("llama"), kvpress.NonCausalAttnPress(0.5, chunk_size=SIZE), tokens(2, 37))
    sums = [part.sum(dim=2) for part in view.side[ChunkMass(SIZE).sides[0]].split(SIZE, dim=2)]
    for total, size in zip(sums, (8, 8, 8, 8, 5), strict=True):
        torch.testing.assert_close(total, torch.full((2, 2), float(size)))


def test_pairs_of_earlier_turns_count_as_average() -> None:
    model, press = tiny_model("llama"), kvpress.NonCausalAttnPress(0.5, chunk_size=SIZE)
    cache = DynamicCache(config=model.config)
    with press(model):
        model(tokens(1, 21), past_key_values=cache)
    kept = cache.layers[0].store.stored()[0]
    recorded = Recorded(press)
    with recorded(model):
        model(tokens(1, 11, seed=1), past_key_values=cache)
    view, scores = recorded.views[0]
    mass = view.side[ChunkMass(SIZE).sides[0]]
    assert bool((mass[..., :kept] == 0).all())
    torch.testing.assert_close(mass[..., kept:].sum(dim=2), torch.full((1, 2), 11.0))
    norms = view.values.norm(dim=-1)
    torch.testing.assert_close(scores[..., 1 : kept - 1], norms.unfold(2, 3, 1).mean(dim=3)[..., : kept - 2])


def test_nothing_is_held_between_turns() -> None:
    model = tiny_model("llama")
    with kvpress.NonCausalAttnPress(0.5, chunk_size=SIZE)(model) as session:
        model.generate(tokens(1, 21), max_new_tokens=4, do_sample=False)
    assert all(not layer.store.observers and not layer.store.window.side for layer in session.cache.layers)


def test_inside_a_decoding_schedule() -> None:
    model = tiny_model("llama")
    press = kvpress.DecodingPress(kvpress.NonCausalAttnPress(chunk_size=SIZE), compression_interval=4, target_size=12)
    with press(model) as session:
        model.generate(tokens(2, 21), max_new_tokens=10, do_sample=False)
    assert {n for layer in session.cache.layers for n in layer.store.stored()} == {13}


def test_configuration() -> None:
    with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
        kvpress.NonCausalAttnPress(chunk_size=0)


@pytest.mark.parametrize("scale", [1.0, 0.05])
def test_a_scale_takes_the_place_of_the_models(scale: float) -> None:
    model, ids = tiny_model("granite"), tokens(1, 21)
    expected = brute_force(model, ids, scale)
    views_by_layer = scored(model, kvpress.NonCausalAttnPress(0.5, chunk_size=SIZE, scale=scale), ids)
    for layer, scores in expected.items():
        ((_, actual),) = views_by_layer[layer]
        torch.testing.assert_close(actual[0].double(), scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("scale", "error"), [(0, ValueError), (-1.0, ValueError), ("1", TypeError), (True, TypeError)])
def test_bad_scales(scale: Any, error: type[Exception]) -> None:
    for press in (kvpress.NonCausalAttnPress, kvpress.CompactorPress):
        with pytest.raises(error, match=r"scale must be .*> 0, got"):
            press(0.5, scale=scale)
