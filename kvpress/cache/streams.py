# SPDX-License-Identifier: Apache-2.0
"""Stored pairs of a layer stream by stream, for methods that choose among all pairs without copying them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.cache.store import KVStore


def real_slots(store: KVStore, mask: Tensor | None) -> list[Tensor]:
    """Return the slots of the real tokens of every row, int64, ascending, on the host; `mask [B, seen]` as in `StoredPairs`."""
    if mask is None:
        return [torch.arange(store.seen)] * store.batch
    return [row.nonzero().flatten() for row in mask.cpu()]


class StoredPairs:
    """Pairs of one layer without padding: `slots[n]` are the slots of stream `n`, int64, ascending, on the host.

    Pairs without a token, whose slot is negative, get the slot of the previous pair, if there is one.
    `mask [B, seen]` marks real tokens, None where nothing is padded.
    """

    def __init__(self, store: KVStore, mask: Tensor | None) -> None:
        self.store = store
        in_window = [row_slots[row_slots >= store.window.first] for row_slots in real_slots(store, mask)]
        self.slots = [row_slots for row_slots in in_window for _ in range(store.heads)]
        for segment in reversed(store.sealed):
            parts = segment.slots().cpu().long().split(segment.layout.lengths)
            self.slots = [torch.cat(pair).cummax(0).values for pair in zip(parts, self.slots, strict=True)]

    def read(self, stream: int, start: int, stop: int) -> list[tuple[Tensor, Tensor]]:
        """Return the pairs `start:stop` of a stream in parts `(keys [n, D], values [n, Dv])`."""
        store, window, parts = self.store, self.store.window, []
        before = 0
        for segment in store.sealed:
            first, length = segment.layout.offsets[stream], segment.layout.lengths[stream]
            begin, end = max(start - before, 0), min(stop - before, length)
            if begin < end:
                parts.append(segment.read(slice(first + begin, first + end)))
            before += length
        indices = (self.slots[stream][max(start, before) : stop] - window.first).to(window.keys.device)
        row, head = divmod(stream, store.heads)
        parts.append((window.keys[row, head, indices], window.values[row, head, indices]))
        return parts
