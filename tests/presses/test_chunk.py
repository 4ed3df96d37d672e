# SPDX-License-Identifier: Apache-2.0
"""The same share of every chunk, chosen within it."""

from __future__ import annotations

import itertools

import pytest
import torch

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


@pytest.mark.parametrize(("inner", "window"), [("snapkv:0.7,window_size=12,kernel_size=1", 12), ("tova:0.7", 1)])
def test_only_the_chunk_at_the_end_holds_a_window(inner: str, window: int) -> None:
    model, (ids, mask) = tiny_model("llama", "eager"), padded_batch([60, 42])
    cache = prefill(model, ChunkPress(kvpress.get_press(inner), 20), ids, mask)
    for row, length in enumerate((60, 42)):
        attentions = model(ids[row : row + 1, -length:], output_attentions=True).attentions
        chunks = -(-length // 20)
        edges, kept = [length * i // chunks for i in range(chunks + 1)], int(length * 0.3)
        for layer, weights in zip(kvpress.kept_positions(cache), attentions, strict=True):
            newest = weights[0, :, -window:].unflatten(0, (2, -1))
            for head in range(2):
                expected: list[int] = []
                for start, stop in itertools.pairwise(edges):
                    shares = newest[..., start:stop] / newest[..., start:stop].sum(dim=-1, keepdim=True)
                    score = shares.mean(dim=(0, 1, 2) if inner.startswith("tova") else (1, 2))
                    score = score if score.dim() == 1 else score[head]
                    score[torch.arange(start, stop) >= length - window] = torch.inf
                    count = kept * stop // length - kept * start // length
                    order = score.flip(0).argsort(descending=True, stable=True)[:count]
                    expected += sorted((60 - length + stop - 1 - order).tolist())
                assert layer[row][head].tolist() == expected
