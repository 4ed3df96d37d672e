# SPDX-License-Identifier: Apache-2.0
"""The same share of every chunk, chosen within it."""

from __future__ import annotations

import pytest

import kvpress
from kvpress import ChunkPress, KeyDiffPress, KnormPress
from tests.caches import prefill
from tests.models import padded_batch, tiny_model, tokens
from tests.presses.scoring import marked
from tests.presses.test_keydiff import dissimilarity


@pytest.mark.parametrize(
    ("length", "chunk", "kept", "shares"),
    [
        (40, 16, 20, [(13, 6), (13, 7), (14, 7)]),
        (40, 40, 7, [(40, 7)]),
        (37, 10, 9, [(9, 2), (9, 2), (9, 2), (10, 3)]),
        (12, 3, 2, [(3, 0), (3, 1), (3, 0), (3, 1)]),
    ],
)
def test_keys_are_compared_within_their_chunk(
    length: int, chunk: int, kept: int, shares: list[tuple[int, int]]
) -> None:
    model, ids = tiny_model("llama"), tokens(2, length)
    cache = prefill(model, ChunkPress(KeyDiffPress(budget=kept), chunk), ids)
    stock = model(ids, use_cache=True).past_key_values
    for row in range(2):
        for head in range(2):
            expected, start = [], 0
            for size, share in shares:
                part = stock.layers[0].keys[row, head, start : start + size]
                expected += [start + i for i in marked(dissimilarity(part), share)]
                start += size
            assert (start, len(expected)) == (length, kept)
            assert kvpress.kept_positions(cache)[0][row][head].tolist() == expected


def test_heads_of_different_lengths_are_cut_too() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([40, 26])
    with kvpress.get_press("adakv(snapkv:0.5,window_size=4) + chunk(knorm:0.8):chunk_length=4")(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)
    for layer in session.cache.layers:
        sizes = layer.store.stored()
        assert all(size <= kept for size, kept in zip(sizes, (8, 8, 5, 5), strict=True))


def test_the_press_inside_keeps_its_own_rule() -> None:
    """H2O keeps the newest tokens with half of its budget; every chunk of the older ones gets its share of the rest."""
    cache = prefill(tiny_model("llama"), ChunkPress(kvpress.H2OPress(0.5), 10), tokens(1, 40))
    for head in kvpress.kept_positions(cache)[0][0]:
        assert head[-10:].tolist() == [*range(30, 40)]
        assert [sum(start <= int(at) < start + 10 for at in head) for start in (0, 10, 20)] == [3, 3, 4]


def test_configuration() -> None:
    with pytest.raises(ValueError, match="chunk_length must be >= 1, got 0"):
        ChunkPress(KnormPress(), 0)
    with pytest.raises(TypeError, match="equally many pairs in every head, and AdaKVPress does not"):
        ChunkPress(kvpress.AdaKVPress(KnormPress()))
    assert ChunkPress(KnormPress()).chunk_length == 1024
