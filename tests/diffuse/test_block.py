# SPDX-License-Identifier: Apache-2.0
"""Replacing pairs: a store reads the new pairs, or refuses to replace encoded, evicted or missing ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.cache.attention import Logits
from kvpress.cache.block import hold_around, open_block, write_rows
from kvpress.cache.codec import Sealing
from kvpress.cache.store import KVStore
from tests.codecs import CODECS

B, H, T, D = 2, 2, 24, 8
MASK = torch.ones(B, T, dtype=torch.bool)
MASK[1, :5] = False
SLOTS = torch.tensor([6, 9, 10, 21])


def pairs(seed: int, count: int = T, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.rand(B, H, count, D, generator=generator, dtype=torch.float32).to(dtype) for _ in range(2))
    return keys, values


def read(store: KVStore, mask: Tensor | None = MASK, causal: bool = False) -> Tensor:
    queries = torch.rand(B, 4, 3, D, generator=torch.Generator().manual_seed(9)).to(store.dtype)
    return store.attend(queries, Logits(0.4), mask, causal=causal)[0]


def filled(seed: int = 0, sealed: int = 0, dtype: torch.dtype = torch.float32) -> KVStore:
    """Return a store of `T` tokens, the first `sealed` of which are sealed."""
    keys, values = pairs(seed, dtype=dtype)
    store = KVStore(keys, values)
    if sealed:
        store.append(keys[:, :, :sealed].contiguous(), values[:, :, :sealed].contiguous())
        store.close(MASK[:, :sealed])
    store.append(keys[:, :, sealed:].contiguous(), values[:, :, sealed:].contiguous())
    return store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sealed", [0, 10, T])
def test_replaced_pairs_are_read(sealed: int, dtype: torch.dtype) -> None:
    store, new = filled(0, sealed, dtype), pairs(1, len(SLOTS), dtype)
    keys, values = (tensor.clone() for tensor in pairs(0, dtype=dtype))
    keys[:, :, SLOTS], values[:, :, SLOTS] = new
    expected = KVStore(keys, values)
    expected.append(keys, values)
    write_rows(store, SLOTS, *new, MASK)
    torch.testing.assert_close(read(store), read(expected), atol=1e-2 if dtype == torch.bfloat16 else 1e-6, rtol=0)
    assert store.stored() == filled(0, sealed).stored()


@pytest.mark.parametrize("sealed", [0, 10, T])
def test_a_copy_and_cropping_restore_the_replaced_pairs(sealed: int) -> None:
    store, new = filled(0, sealed), pairs(1, len(SLOTS))
    before, twin = read(store), copy.deepcopy(store)
    write_rows(twin, SLOTS, *new, MASK)
    torch.testing.assert_close(read(store), before)
    assert not torch.allclose(read(twin), before)

    store.record(True)
    more = pairs(2, 2)
    store.append(*more)
    write_rows(store, SLOTS, *new, torch.cat([MASK, MASK[:, -2:]], dim=1))
    store.crop(2)
    torch.testing.assert_close(read(store), before)


def test_replacing_pairs_without_recording_closes_tokens() -> None:
    store = filled()
    assert store.open_tokens == T
    write_rows(store, SLOTS, *pairs(1, len(SLOTS)), MASK)
    assert store.open_tokens == 0


@pytest.mark.parametrize("name", CODECS)
def test_dense_pairs_are_replaced_and_encoded_pairs_refused(name: str) -> None:
    codec, _ = CODECS[name]
    store = filled()
    store.settle(codec, Sealing(heads=H, seen=T, mask=MASK))
    assert store.segments
    before = read(store)
    if name == "dense":
        write_rows(store, SLOTS, *pairs(1, len(SLOTS)), MASK)
        expected = filled()
        write_rows(expected, SLOTS, *pairs(1, len(SLOTS)), MASK)
        torch.testing.assert_close(read(store), read(expected))
        return
    with pytest.raises(NotImplementedError, match=r"slot 9 is encoded as \w+, in a tile with others"):
        write_rows(store, torch.tensor([9, 23]), *pairs(1, 2), MASK)
    assert torch.equal(read(store), before)
    write_rows(store, torch.tensor([22, 23]), *pairs(1, 2), MASK)
    assert not torch.allclose(read(store), before)


@pytest.mark.parametrize(("first", "stop"), [(0, 4), (8, 14), (20, T)])
def test_a_block_attends_to_all_pairs_around_it(first: int, stop: int) -> None:
    mask = MASK if first else None  # a block begins after the padding
    keys, values = pairs(0)
    store = hold_around(keys, values, first, stop, mask)
    open_block(store, first, keys[:, :, first:stop], values[:, :, first:stop], mask)
    expected = KVStore(keys, values)
    expected.append(keys, values)
    torch.testing.assert_close(read(store, mask), read(expected, mask))
    assert store.stored() == ([T] * 4 if mask is None else [T, T, T - 5, T - 5])
    new = pairs(3, stop - first)
    write_rows(store, torch.arange(first, stop), *new, mask)
    write_rows(expected, torch.arange(first, stop), *new, mask)
    torch.testing.assert_close(read(store, mask), read(expected, mask))


def test_pairs_around_a_block_are_copies() -> None:
    keys, values = pairs(0)
    store = hold_around(keys, values, 8, 14, None)
    open_block(store, 8, keys[:, :, 8:14], values[:, :, 8:14], None)
    write_rows(store, torch.arange(8, 14), *pairs(1, 6))
    assert torch.equal(keys, pairs(0)[0])
    pointers = {t.untyped_storage().data_ptr() for tensors in store.tensors().values() for t in tensors}
    assert not pointers & {keys.untyped_storage().data_ptr(), values.untyped_storage().data_ptr()}


def evicted() -> KVStore:
    store = filled()
    store.evict([torch.arange(n) % 2 == 0 for n in (T, T, T - 5, T - 5)], MASK)
    return store


NEW = pairs(1, 2)
BAD: dict[str, tuple[Any, tuple[Any, ...], type[Exception], str]] = {
    "shape": (
        filled,
        (torch.tensor([1, 2, 3]), *NEW),
        ValueError,
        r"keys must have shape \(2, 2, 3, 8\) for 3 slots, got",
    ),
    "values": (filled, (torch.tensor([6, 7]), NEW[0], NEW[1][..., :4]), ValueError, r"values must have shape"),
    "dtype": (filled, (torch.tensor([6, 7]), NEW[0].half(), NEW[1].half()), TypeError, "must be torch.float32"),
    "slots": (filled, (torch.tensor([6.0, 7.0]), *NEW), TypeError, "slots must be an int64 tensor"),
    "order": (filled, (torch.tensor([7, 6]), *NEW), ValueError, "slots must ascend within 0, ..., 23"),
    "range": (filled, (torch.tensor([7, 24]), *NEW), ValueError, "slots must ascend within 0, ..., 23"),
    "evicted": (evicted, (torch.tensor([6, 7]), *NEW, MASK), ValueError, "row 0, head 0 holds no pair in slot 7"),
    "padding": (
        lambda: filled(0, 10),
        (torch.tensor([3, 7]), *NEW),
        ValueError,
        "row 1, head 0 holds no pair in slot 3",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pairs_are_refused_and_the_store_does_not_change(name: str) -> None:
    make, arguments, error, message = BAD[name]
    store = make()
    before = read(store)
    with pytest.raises(error, match=message):
        write_rows(store, *arguments)
    assert torch.equal(read(store), before)
