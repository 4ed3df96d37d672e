# SPDX-License-Identifier: Apache-2.0
"""Replacement of stored pairs, for a block of tokens that is read repeatedly while the pairs around it stay.

Generators that change earlier tokens, such as masked diffusion, store the pairs around the block as usual (dense, evicted or
encoded) and overwrite the pairs of the block at every step.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.cache.store import KVStore
from kvpress.cache.window import Window


def hold_around(keys: Tensor, values: Tensor, first: int, stop: int, mask: Tensor | None) -> KVStore:
    """Return a store of the pairs `keys [B, H, T, D]` and `values` outside the slots `[first, stop)`, without a window.

    Each pair is in the slot of its token; padding, which `mask [B, T]` leaves out, is not stored.
    """
    store = KVStore(keys, values)
    batch, heads, tokens = keys.shape[:3]
    outside = torch.arange(tokens, device=keys.device)
    outside = outside[(outside < first) | (outside >= stop)]
    chosen = torch.zeros(batch, heads, tokens, dtype=torch.bool, device=keys.device)
    chosen[:, :, outside] = True if mask is None else mask[:, None, outside].to(keys.device)
    layout = Layout(chosen.sum(dim=2).flatten().tolist())
    sealed = DenseSegment(keys[chosen], values[chosen], layout)
    sealed._set_slots(chosen.nonzero()[:, 2])
    store.seen = tokens
    store.seal(sealed, mask)
    return store


def open_block(store: KVStore, first: int, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
    """Write the pairs `[B, H, n, D]` of the tokens in slots `first, ..., first + n - 1` to the window, which is empty.

    Unlike elsewhere, sealed pairs may then have later slots than the window. Bidirectional attention does not depend on order.
    """
    store.window = Window.empty_like(keys, values, first)
    store.window.append(keys.contiguous(), values.contiguous())
    if store.sealed_tokens is not None:
        # Compared with the mask before the window, to detect that the mask has changed.
        store.sealed_tokens = [first] * store.batch if mask is None else mask[:, :first].sum(dim=1).tolist()


def write_rows(store: KVStore, slots: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> None:
    """Replace the pairs in `slots [n]`, ascending, of every row and head by `keys [B, H, n, D]` and `values [B, H, n, Dv]`.

    Pairs in the window are written in place. Dense sealed pairs get a new segment, so that copies of the cache do not change.
    Log-weights and per-pair arrays stay. Slots of padding, by `mask [B, seen]`, are skipped. If the store records, `crop`
    restores the old pairs; otherwise all tokens so far are closed.

    Raises:
        ValueError: a slot does not exist or was evicted, or a shape is wrong; nothing was written.
        TypeError: the pairs have another dtype.
        NotImplementedError: a pair is encoded; nothing was written.
    """
    _check(store, slots, keys, values)
    window = store.window
    inside = ((slots >= window.first) & (slots < window.first + window.length)).nonzero().flatten()
    outside = ((slots < window.first) | (slots >= window.first + window.length)).nonzero().flatten()
    parts = _rewritten(store, slots, outside, keys, values, mask) if len(outside) else None
    store.save()
    if parts is not None:
        encoded = len(store.segments)
        store.segments = parts[:encoded]
        if len(parts) > encoded:
            store.dense = parts[-1]
        store.index, window.cursor = {}, None  # a recorded step must not read the old tensors
    if len(inside):
        if store.journal:
            store.window = window = copy.deepcopy(window)
        columns = (slots[inside] - window.first).to(window.keys.device)
        window.keys.index_copy_(2, columns, keys[:, :, inside])
        window.values.index_copy_(2, columns, values[:, :, inside])


def _check(store: KVStore, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    window = store.window
    for name, array, stored in (("keys", keys, window.keys), ("values", values, window.values)):
        shape = (store.batch, store.heads, len(slots), stored.shape[3])
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape} for {len(slots)} slots, got {tuple(array.shape)}")
        if array.dtype != store.dtype:
            raise TypeError(f"{name} must be {store.dtype}, the dtype of this cache, got {array.dtype}")
    if slots.dtype != torch.int64 or slots.dim() != 1:
        raise TypeError(f"slots must be an int64 tensor [n], got {slots.dtype} {tuple(slots.shape)}")
    if len(slots) and (int(slots[0]) < 0 or int(slots[-1]) >= store.seen or bool((slots.diff() <= 0).any())):
        raise ValueError(
            f"slots must ascend within 0, ..., {store.seen - 1}, the tokens that this cache has seen, got {slots.tolist()}"
        )


def _rewritten(
    store: KVStore, slots: Tensor, outside: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> list[Segment]:
    """Return the sealed segments with the pairs in the slots `outside` the window replaced."""
    target_slots = slots[outside].to(keys.device)
    parts: list[Segment] = []
    missing = torch.ones(store.batch * store.heads, len(target_slots), dtype=torch.bool, device=keys.device)
    if mask is not None:
        missing &= mask[:, target_slots.to(mask.device)].to(keys.device).repeat_interleave(store.heads, dim=0)
    for stored_segment in store.sealed:
        segment = stored_segment.own()
        stored_slots = segment.slots().long()
        nearest = torch.searchsorted(target_slots, stored_slots).clamp_max(len(target_slots) - 1)
        hit = target_slots[nearest] == stored_slots
        if bool(hit.any()):
            if not isinstance(segment, DenseSegment):
                raise NotImplementedError(
                    f"the pair in slot {int(stored_slots[hit][0])} is encoded as {type(segment).__name__}, in a tile with "
                    "others, and cannot be replaced alone: keep tokens that will be replaced in the window or the codec's "
                    "residual"
                )
            stream, source = (
                segment.layout.stream_of_row.to(stored_slots.device)[hit],
                outside.to(stored_slots.device)[nearest[hit]],
            )
            missing[stream, nearest[hit]] = False
            segment = copy.deepcopy(segment)
            segment.keys, segment.values = segment.keys.clone(), segment.values.clone()
            segment.keys[hit] = keys.flatten(0, 1)[stream, source]
            segment.values[hit] = values.flatten(0, 1)[stream, source]
            segment.index = {}
        parts.append(segment)
    if bool(missing.any()):
        n, column = missing.nonzero()[0].tolist()
        raise ValueError(
            f"row {n // store.heads}, head {n % store.heads} holds no pair in slot {int(target_slots[column])}, which was "
            "evicted or is padding: replace stored pairs only, and pass the mask of real tokens where rows are padded"
        )
    return parts
