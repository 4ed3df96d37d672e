# SPDX-License-Identifier: Apache-2.0
"""Whole chunks, the same in every head."""

from __future__ import annotations

import math

import pytest

import kvpress
from kvpress import ChunkKVPress, KnormPress
from tests.caches import prefill
from tests.models import padded_batch, tiny_model, tokens


@pytest.mark.parametrize(("length", "chunk", "kept"), [(40, 5, 20), (40, 7, 17), (37, 20, 9), (33, 1, 10), (40, 4, 39)])
def test_the_best_chunks_stay_whole(length: int, chunk: int, kept: int) -> None:
    model, ids = tiny_model("llama"), tokens(2, length)
    cache = prefill(model, ChunkKVPress(KnormPress(budget=kept), chunk), ids)
    stock = model(ids, use_cache=True).past_key_values
    for row in range(2):
        token_scores = [-sum(float(head[t].norm()) for head in stock.layers[0].keys[row]) for t in range(length)]
        spans = [range(start, min(start + chunk, length)) for start in range(0, length, chunk)]
        spans.sort(key=lambda span: math.fsum(token_scores[t] for t in span) / len(span), reverse=True)
        expected: list[int] = []
        for span in spans:
            room = kept - len(expected)
            expected += sorted(span, key=lambda t: token_scores[t], reverse=True)[:room]
        for head in kvpress.kept_positions(cache)[0][row]:
            assert head.tolist() == sorted(expected)


def test_rows_choose_chunks_of_their_own_tokens() -> None:
    model, lengths = tiny_model("llama"), [40, 27]
    ids, mask = padded_batch(lengths)
    cache = prefill(model, kvpress.get_press("chunkkv(snapkv:0.5,window_size=4):chunk_length=6"), ids, mask)
    partial = 0
    for row, length in enumerate(lengths):
        pads = 40 - length
        kept = {int(t) - pads for t in kvpress.kept_positions(cache)[0][row][0]}
        assert len(kept) == length // 2
        assert {*range(length - 4, length)} <= kept
        spans = [set(range(start, min(start + 6, length))) for start in range(0, length, 6)]
        partial += sum(0 < len(span & kept) < len(span) for span in spans)
    assert partial <= len(lengths)


def test_heads_of_different_lengths_share_their_order_of_chunks() -> None:
    model = tiny_model("llama")
    press = kvpress.get_press("adakv(snapkv:0.3,window_size=4) + chunkkv(knorm:0.7):chunk_length=5")
    cache = prefill(model, press, tokens(1, 40))
    for layer in kvpress.kept_positions(cache):
        assert [len(head) for head in layer[0]] == [8, 8]  # 0.3 of the 28 that were left
    plain = prefill(model, kvpress.get_press("adakv(snapkv:0.3,window_size=4)"), tokens(1, 40))
    (first_head, second_head), plain_heads = kvpress.kept_positions(cache)[0][0], kvpress.kept_positions(plain)[0][0]
    assert len(plain_heads[0]) != len(plain_heads[1])
    for kept, plain_kept in ((first_head, plain_heads[0]), (second_head, plain_heads[1])):
        cut = [
            c for c in range(8) if 0 < sum(int(t) // 5 == c for t in kept) < sum(int(t) // 5 == c for t in plain_kept)
        ]
        assert len(cut) <= 1


def test_configuration() -> None:
    with pytest.raises(ValueError, match="chunk_length must be >= 1, got 0"):
        ChunkKVPress(KnormPress(), 0)
    assert ChunkKVPress(KnormPress()).chunk_length == 20
