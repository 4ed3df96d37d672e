# SPDX-License-Identifier: Apache-2.0
"""Pairs with log-weights count as often as they weigh, in every format and part of a store."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.cache.attention import Logits
from kvpress.cache.codec import DenseCodec, Sealing
from kvpress.cache.files import pack, unpack
from kvpress.cache.layout import Layout
from kvpress.cache.segment import Segment
from kvpress.cache.store import KVStore
from tests.formats import CODECS, DIM, HEADS, every_codec, logit_pairs, segment


@every_codec
@pytest.mark.parametrize("rows", [2, 70], ids=["few", "many"])
def test_equal_pairs_pooled_into_one_give_the_same_attention(name: str, rows: int) -> None:
    pooled = segment(name)
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(1, 5, (pooled.layout.total,), generator=generator)
    copies = torch.arange(len(counts)).repeat_interleave(counts)
    lengths = [int(part.sum()) for part in counts.split(list(pooled.layout.lengths))]
    repeated = pooled.take(copies, Layout(lengths))
    pooled.log_weight = counts.float().log()
    queries, logits = torch.randn(4, rows, DIM, generator=generator), Logits(0.2, 5.0)

    def same(actual: Any, expected: Any) -> None:
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)

    reference = repeated.attend(queries, logits)
    same(pooled.attend(queries, logits), reference)
    hidden = torch.rand(len(counts), generator=generator) < 0.4
    same(pooled.attend(queries, logits, hidden), repeated.attend(queries, logits, hidden[copies]))
    received = repeated.mass(queries, logits, reference[1])
    torch.testing.assert_close(
        pooled.mass(queries, logits, reference[1]),
        torch.zeros(len(counts)).index_add_(0, copies, received),
        atol=1e-4,
        rtol=1e-4,
    )
    same(*(chosen_pairs(stored, mark, queries) for stored, mark in ((pooled, ~hidden), (repeated, ~hidden[copies]))))
    # Subsets, joins and splits keep the weights.
    half = (torch.arange(len(counts)) % 2 == 0).nonzero().flatten()
    layout = Layout(torch.bincount(pooled.layout.streams_of(half), minlength=4).tolist())
    assert torch.equal(pooled.take(half, layout).log_weight, pooled.log_weight[half])
    twin = copy.deepcopy(pooled)
    twin.log_weight = None
    same(pooled.attend(queries, logits), reference)
    assert torch.equal(unpack(*pack(pooled)).log_weight, counts.float().log())


def chosen_pairs(stored: Segment, mark: Tensor, queries: Tensor) -> Any:
    """Attend to the marked pairs as a list."""
    lists = [stored.layout.offsets[n] + mark[stored.layout.rows(n)].nonzero().flatten() for n in range(4)]
    rows = torch.nn.utils.rnn.pad_sequence(lists, batch_first=True)
    return stored.attend_rows(queries, Logits(0.2, 5.0), rows, torch.tensor([len(ranks) for ranks in lists]))


@every_codec
def test_weights_are_added_to_the_logits(name: str) -> None:
    stored = segment(name)
    stored.log_weight = torch.randn(stored.layout.total, generator=torch.Generator().manual_seed(3))
    queries = torch.randn(4, 3, DIM, generator=torch.Generator().manual_seed(4))
    out, lse = stored.attend(queries, Logits(0.2, 5.0))
    for n in range(4):
        logits, values = logit_pairs(stored, queries, n)
        logits = logits + stored.log_weight[stored.layout.rows(n)]
        torch.testing.assert_close(lse[n], logits.logsumexp(-1), atol=1e-3, rtol=1e-3)
        expected = logits.softmax(-1) @ values if logits.shape[1] else torch.zeros(3, DIM)
        torch.testing.assert_close(out[n], expected, atol=2e-3, rtol=1e-3)


def pooled_and_repeated(pads: list[int] | None) -> tuple[KVStore, KVStore, Tensor, Tensor | None, Tensor | None]:
    """Return two stores of the same tokens, once weighed and once repeated as often as they weigh, and their masks."""
    counts = torch.randint(1, 4, (24,), generator=torch.Generator().manual_seed(0))
    copies = torch.arange(24).repeat_interleave(counts)
    keys, values = torch.randn(2, 2, HEADS, 24, DIM, generator=torch.Generator().manual_seed(1))
    pooled, repeated = KVStore(keys, values), KVStore(keys, values)
    pooled.append(keys, values)
    repeated.append(keys[:, :, copies], values[:, :, copies])
    pooled.window.weigh(counts.float().log().expand(2, HEADS, -1))
    if pads is None:
        return pooled, repeated, copies, None, None
    mask = torch.arange(24) >= torch.tensor(pads)[:, None]
    return pooled, repeated, copies, mask, mask[:, copies]


@pytest.mark.parametrize("new", [1, 5], ids=["token", "turn"])
@pytest.mark.parametrize("pads", [None, [0, 4], "holes"], ids=["even", "padded", "holes"])
def test_pooled_tokens_weigh_as_much_wherever_they_are_kept(pads: Any, new: int) -> None:
    pooled, repeated, copies, mask, masks = pooled_and_repeated([0, 4] if pads == "holes" else pads)
    if pads == "holes":
        mask[1, 7:9] = False
        masks = mask[:, copies]
    generator = torch.Generator().manual_seed(5)

    def both(change: Callable[[KVStore, Tensor | None], None]) -> None:
        change(pooled, mask)
        change(repeated, masks)

    def check() -> None:
        queries = torch.randn(pooled.batch, 2 * HEADS, new, DIM, generator=generator)
        keys, values = torch.randn(2, pooled.batch, HEADS, new, DIM, generator=generator)
        outputs = []
        for store, real in ((pooled, mask), (repeated, masks)):
            copied = copy.deepcopy(store)
            copied.append(keys.clone(), values.clone())
            extra = None if real is None else torch.nn.functional.pad(real, (0, new), value=True)
            outputs.append(copied.attend(queries, Logits(0.2), extra))
        for a, b in zip(*outputs, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)

    check()
    counts = [sum(parts) for parts in zip([0] * 4, pooled.open_segment(mask).layout.lengths, strict=True)]
    kept = [torch.rand(n, generator=generator) < 0.7 for n in counts]
    slots = pooled.open_segment(mask).slots().split(counts)
    marked = [at[mark].long() for at, mark in zip(slots, kept, strict=True)]
    keep = [torch.isin(copies[real_slots(masks, n)], at) for n, at in enumerate(marked)]
    pooled.evict(kept, mask)
    repeated.evict(keep, masks)
    check()
    both(lambda store, real: store.settle(DenseCodec(2, 1), Sealing(HEADS, mask=real)))
    assert pooled.segments
    check()
    if mask is not None:
        # Tokens that were real when they were sealed are hidden now.
        mask[0, 3], masks[0, copies == 3] = False, False
        check()
    both(lambda store, real: store.select_rows(torch.tensor([1, 0, 0])))
    if mask is not None:
        mask, masks = mask[[1, 0, 0]], masks[[1, 0, 0]]
    check()


def real_slots(mask: Tensor | None, n: int) -> Tensor | slice:
    return slice(None) if mask is None else mask[n // HEADS].nonzero().flatten()


@pytest.mark.parametrize("name", CODECS)
def test_a_sealed_copy_of_the_window_keeps_its_weights(name: str) -> None:
    codec = CODECS[name]
    store = KVStore(torch.zeros(2, HEADS, 0, DIM), torch.zeros(2, HEADS, 0, DIM))
    weights = {}
    for turn in range(3):
        store.append(*torch.randn(2, 2, HEADS, codec.group + 5, DIM).unbind(0))
        for side in codec.reads_side:
            store.window.side[side] = torch.rand(2, HEADS, store.window.length)
        if turn != 1:
            factors = torch.rand(2, HEADS, store.window.length)
            store.window.weigh(factors)
            for n, row in enumerate(factors.flatten(0, 1)):
                weights |= {(n, at): float(weight) for at, weight in enumerate(row, store.window.first)}
        store.settle(codec, Sealing(HEADS, seen=store.seen), turn=name == "without values")
    assert store.segments
    for part in store.sealed:
        for n in range(4):
            rows = part.layout.rows(n)
            expected = [weights.get((n, at), 0.0) for at in part.slots()[rows].tolist()]
            log_weights = torch.zeros(part.layout.total) if part.log_weight is None else part.log_weight
            assert log_weights[rows].tolist() == pytest.approx(expected)


def test_a_layer_that_keeps_nothing_has_nothing_to_weigh() -> None:
    """Layers compete under kvzip: one may keep no pair of a short prompt, and later tokens are read as usual."""
    store = KVStore(torch.zeros(1, HEADS, 0, DIM), torch.zeros(1, HEADS, 0, DIM))
    store.append(*torch.randn(2, 1, HEADS, 5, DIM).unbind(0))
    store.evict([torch.zeros(5, dtype=torch.bool)] * HEADS, None)
    store.weigh({n: torch.zeros(0) for n in range(HEADS)})
    assert store.sealed == []
    with pytest.raises(ValueError, match=r"must have shape \(0,\), got \(1,\)"):
        store.weigh({0: torch.zeros(1)})
