# SPDX-License-Identifier: Apache-2.0
"""RocketKV against its two stages: SnapKV's eviction, and pages chosen by loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress import RocketKVPress, SnapKVPress
from kvpress.observe.call import LayerCall
from kvpress.sparse.rocketkv import ChannelPages, in_largest_channels
from tests.caches import generate, positions, prefill
from tests.models import padded_batch, tiny_model, tokens


def test_the_prompt_is_evicted_from_by_snapkv() -> None:
    model, ids = tiny_model("llama"), tokens(2, 100)
    cache = prefill(model, RocketKVPress(0.25, window_size=8, kernel_size=7), ids)
    assert positions(cache) == positions(prefill(model, SnapKVPress(0.5, window_size=8, kernel_size=7), ids))
    assert RocketKVPress(0.25).compression_ratio == 0.5


def test_with_all_channels_it_is_snapkv_and_quest() -> None:
    model, ids = tiny_model("llama"), tokens(2, 200)
    tokens_of = []
    for spec in (
        "rocketkv:share=0.25,window_size=8,kernel_size=7,channels=64",
        "snapkv:0.5,window_size=8,kernel_size=7 + quest:budget=0.5,page_size=4,skip_layers=0",
        "snapkv:0.5,window_size=8,kernel_size=7",
    ):
        with kvpress.get_press(spec)(model):
            tokens_of.append(generate(model, ids, max_new_tokens=12).sequences.tolist())
    assert tokens_of[0] == tokens_of[1]
    assert tokens_of[0] != tokens_of[2]


def by_loops(query: Tensor, keys: Tensor, size: int, channels: int, count: int) -> set[int]:
    """Return the ranks of the pairs in the best `count` pages for the `query [G, D]` on the `keys [n, D]` of one stream."""
    largest = sorted(range(query.shape[1]), key=lambda d: -float(query[:, d].abs().sum()))[:channels]
    bounds = []
    for start in range(0, len(keys), size):
        low, high = keys[start : start + size].amin(dim=0), keys[start : start + size].amax(dim=0)
        bounds.append(max(sum(float(max(q[d] * low[d], q[d] * high[d])) for d in largest) for q in query))
    best = sorted(range(len(bounds)), key=lambda page: -bounds[page])[:count]
    return {rank for page in best for rank in range(page * size, min(len(keys), (page + 1) * size))}


@pytest.mark.parametrize("channels", [1, 5, 32])
def test_pages_are_those_of_loops(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = tiny_model("llama"), []
    choose = ChannelPages.choose

    def watched(self: Any, call: LayerCall, queries: Tensor, first: int = 0) -> Any:
        result = choose(self, call, queries, first)
        assert len(call.store.segments) == 1
        segment = call.store.segments[0]
        for n, query in enumerate(queries):
            rows = segment.layout.rows(n % segment.layout.streams)
            keys = segment.read(rows)[0]
            chosen = result[0][0]
            seen.append({row - rows.start for row in chosen.rows[n, : chosen.counts[n]].tolist()})
            assert len(seen[-1]) < len(keys)
            assert seen[-1] == by_loops(query, keys, 4, channels, len(seen[-1]) // 4)
        return result

    monkeypatch.setattr(ChannelPages, "choose", watched)
    press = RocketKVPress(0.25, window_size=8, kernel_size=7, channels=channels)
    with press(model):
        generate(model, tokens(2, 200), max_new_tokens=2)
    assert len(seen) == 3 * 4


def test_largest_channels() -> None:
    queries = torch.tensor([[[1.0, -5.0, 0.5, 2.0], [1.0, 0.0, -0.4, 2.0]]])
    assert in_largest_channels(queries, 2).tolist() == [[[0.0, -5.0, 0.0, 2.0], [0.0, 0.0, 0.0, 2.0]]]
    assert in_largest_channels(queries, 4) is queries


def test_a_padded_row_equals_that_row_alone() -> None:
    model, lengths = tiny_model("llama"), [160, 97]
    ids, mask = padded_batch(lengths)
    press = RocketKVPress(0.25, window_size=8, kernel_size=7, channels=8)
    with press(model):
        together = generate(model, ids, mask, max_new_tokens=8)
    for row, length in enumerate(lengths):
        with press(model):
            alone = generate(model, ids[row : row + 1, -length:], max_new_tokens=8)
        assert torch.equal(together.sequences[row, 160:], alone.sequences[0, length:])


def test_configuration() -> None:
    model, ids = tiny_model("llama"), tokens(1, 60)
    with RocketKVPress()(model):
        same = generate(model, ids, max_new_tokens=5).sequences
    assert torch.equal(same, generate(model, ids, max_new_tokens=5).sequences)
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"share must be .*got {share}"):
            RocketKVPress(share)
    with pytest.raises(ValueError, match="kernel_size must be"):
        RocketKVPress(0.5, kernel_size=4)
