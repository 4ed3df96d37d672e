# SPDX-License-Identifier: Apache-2.0
"""A store whose pairs are replaced: a block of tokens that is read again and again while the pairs around it stay.

Generators that change tokens already read, such as masked diffusion, hold what lies around the block as any store does (dense,
evicted from or encoded) and write the block's pairs anew at every step.
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
    """Put the pairs `[B, H, n, D]` of the tokens in slots `first, ..., first + n - 1` into the window, which is empty.

    Unlike elsewhere, sealed pairs may then be in later slots than those of the window. What is read both ways does not mind.
    """
    store.window = Window.empty_like(keys, values, first)
    store.window.append(keys.contiguous(), values.contiguous())
    if store.sealed_tokens is not None:
        # What is asked of these is whether the mask has changed since, by its part before the window.
        store.sealed_tokens = [first] * store.batch if mask is None else mask[:, :first].sum(dim=1).tolist()


def write_rows(store: KVStore, slots: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> None:
    """Replace the pairs in `slots [n]`, ascending, of every row and head by `keys [B, H, n, D]` and `values [B, H, n, Dv]`.

    Pairs in the window are written in place. Dense sealed pairs get a new segment, so that copies of the cache keep theirs.
    Weights, and what observers recorded of a pair, stay. Slots that `mask [B, seen]` marks as padding are passed over. Where
    the store records, `crop` brings back what was there; elsewhere the tokens so far are closed.

    Raises:
        ValueError: a slot is not there, was evicted, or a shape is another; nothing was written.
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
        store.index, window.cursor = {}, None  # a recorded step must not read what was there
    if len(inside):
        if store.journal:
            store.window = window = copy.deepcopy(window)
        at = (slots[inside] - window.first).to(window.keys.device)
        window.keys.index_copy_(2, at, keys[:, :, inside])
        window.values.index_copy_(2, at, values[:, :, inside])


def _check(store: KVStore, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    window = store.window
    for name, part, held in (("keys", keys, window.keys), ("values", values, window.values)):
        shape = (store.batch, store.heads, len(slots), held.shape[3])
        if part.shape != shape:
            raise ValueError(f"{name} must have shape {shape} for {len(slots)} slots, got {tuple(part.shape)}")
        if part.dtype != store.dtype:
            raise TypeError(f"{name} must be {store.dtype}, as the pairs of this cache are, got {part.dtype}")
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
    wanted = slots[outside].to(keys.device)
    parts: list[Segment] = []
    missing = torch.ones(store.batch * store.heads, len(wanted), dtype=torch.bool, device=keys.device)
    if mask is not None:
        missing &= mask[:, wanted.to(mask.device)].to(keys.device).repeat_interleave(store.heads, dim=0)
    for part in store.sealed:
        own = part.own()
        held = own.slots().long()
        at = torch.searchsorted(wanted, held).clamp_max(len(wanted) - 1)
        hit = wanted[at] == held
        if bool(hit.any()):
            if not isinstance(own, DenseSegment):
                raise NotImplementedError(
                    f"the pair in slot {int(held[hit][0])} is encoded as {type(own).__name__}, in a tile with others, and "
                    "cannot be replaced alone: leave the tokens that will be replaced to the window or the codec's residual"
                )
            stream, source = own.layout.stream_of_row.to(held.device)[hit], outside.to(held.device)[at[hit]]
            missing[stream, at[hit]] = False
            own = copy.deepcopy(own)
            own.keys, own.values = own.keys.clone(), own.values.clone()
            own.keys[hit] = keys.flatten(0, 1)[stream, source]
            own.values[hit] = values.flatten(0, 1)[stream, source]
            own.index = {}
        parts.append(own)
    if bool(missing.any()):
        n, place = missing.nonzero()[0].tolist()
        raise ValueError(
            f"row {n // store.heads}, head {n % store.heads} holds no pair in slot {int(wanted[place])}, which was evicted or "
            "is padding: replace pairs that are stored, and hand over the mask of real tokens where rows are padded"
        )
    return parts
