# SPDX-License-Identifier: Apache-2.0
"""PQCache: centroids of keys, the pairs that their logits choose, and when centroids are fitted."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from tests.models import padded_batch, tiny_model, tokens
from tests.sparse.stored import DIM, GROUPS, LENGTHS, STREAMS, call_of, chosen_ranks, pairs_of


def best_ranks(call: Any, keys: Tensor, weights: Tensor, query: Tensor, budget: tuple[int, int, int]) -> list[int]:
    """Return the ranks of the sinks, the recent pairs and the largest summed shares of `keys [n, D]` for `query [G, D]`."""
    size, first, last = budget
    logits = call.logits(query.double(), keys) + weights
    free = slice(first, len(keys) - last)
    shares = torch.zeros(len(keys), dtype=torch.float64)
    shares[free] = torch.softmax(logits[:, free], dim=1).sum(dim=0)
    shares[:first] = shares[len(keys) - last :] = torch.inf
    return shares.topk(min(size, len(keys))).indices.sort().values.tolist()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("parts", "bits"), [(1, 3), (2, 4), (8, 2)])
@pytest.mark.parametrize("forced", [(0, 0), (3, 5)])
def test_the_pairs_with_the_largest_estimated_attention_are_read(
    forced: tuple[int, int], parts: int, bits: int, softcap: float | None
) -> None:
    call = call_of(LENGTHS, softcap=softcap)
    queries = torch.randn(2 * STREAMS, GROUPS, DIM, generator=torch.Generator().manual_seed(5))
    press = kvpress.PQCachePress(20, parts, bits, n_sink=forced[0], n_recent=forced[1])
    (chosen,) = press.selector_at(0).choose(call, queries)
    (state,) = call.store.codec_state.values()
    assert state.tables.shape == (STREAMS, parts, 2**bits, DIM // parts)
    for row, query in enumerate(queries):
        stream = row % STREAMS
        keys, _, weights = pairs_of(call, stream)
        centroids, rounded = state.tables[stream].double(), []
        for key in keys:
            pieces = key.view(parts, -1)
            nearest = [int((centroids[j] - pieces[j]).square().sum(dim=1).argmin()) for j in range(parts)]
            rounded.append(torch.cat([centroids[j, code] for j, code in enumerate(nearest)]))
        expected = best_ranks(call, torch.stack(rounded), weights, query, (20, *forced))
        assert chosen_ranks(call, chosen, stream, row) == expected


def test_scores_are_exact_where_every_part_of_a_key_has_a_centroid() -> None:
    call = call_of([[200] * STREAMS], distinct=6)
    queries = torch.randn(STREAMS, GROUPS, DIM, generator=torch.Generator().manual_seed(5))
    (chosen,) = kvpress.PQCachePress(25, parts=2, bits=5).selector_at(0).choose(call, queries)
    for stream, query in enumerate(queries):
        keys, _, weights = pairs_of(call, stream)
        assert chosen_ranks(call, chosen, stream, stream) == best_ranks(call, keys, weights, query, (25, 0, 0))


def test_more_centroids_round_keys_less() -> None:
    errors = []
    for bits in range(1, 8):
        call = call_of([[400] * STREAMS])
        selector = kvpress.PQCachePress(25, parts=2, bits=bits).selector_at(0)
        selector.prepare(call.store)
        (state,) = call.store.codec_state.values()
        codes = call.store.segments[0].index["pqcache"].codes.long().view(STREAMS, 400, 2)
        rounded = torch.stack(
            [torch.cat([state.tables[n, j][codes[n, :, j]] for j in range(2)], dim=1) for n in range(STREAMS)]
        )
        errors.append(float((rounded.flatten(0, 1) - call.store.segments[0].keys).square().mean()))
    assert all(fewer > more for fewer, more in itertools.pairwise(errors))
    assert errors[0] < 1.0  # the variance of a channel


def test_centroids_are_fitted_again_until_a_head_has_enough_pairs() -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([150, 70])  # the second row seals its first pairs while tokens are generated
    press, cache = kvpress.get_press("pqcache:budget=20,bits=5"), DynamicCache(config=model.config)
    fitted, tables = [], []
    with press(model):
        model(ids, attention_mask=mask, past_key_values=cache)
        for seed in range(4):
            (state,) = cache.layers[1].store.codec_state.values()
            fitted.append(state.fitted_pairs)
            tables.append(state.tables.clone())
            mask = torch.cat([mask, torch.ones(2, 64, dtype=mask.dtype)], dim=1)
            model(tokens(2, 64, seed=seed), attention_mask=mask, past_key_values=cache)
    assert fitted == [(128, 128, 0, 0), (128, 128, 64, 64), (128, 128, 128, 128), (128, 128, 128, 128)]
    assert all(torch.equal(table[:2], tables[0][:2]) for table in tables)
    assert not torch.equal(tables[1][2:], tables[2][2:])
    assert torch.equal(tables[3], tables[2])
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(state.tables, tables[3][[2, 3, 0, 1]])


def test_the_seed_chooses_the_first_centroids() -> None:
    tables = []
    for seed in (0, 0, 1):
        call = call_of([[200] * STREAMS])
        kvpress.PQCachePress(25, bits=4, seed=seed, iterations=1).selector_at(0).prepare(call.store)
        tables += [state.tables for state in call.store.codec_state.values()]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="bits must be 1, 2, 3, 4, 5, 6, 7 or 8, got 9"):
        kvpress.PQCachePress(bits=9)  # type: ignore[arg-type]
    with (
        pytest.raises(ValueError, match="parts must divide the head dim 32 of the model, got 3"),
        kvpress.PQCachePress(parts=3)(tiny_model("llama")),
    ):
        pass
