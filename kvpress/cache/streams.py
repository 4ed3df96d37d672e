# SPDX-License-Identifier: Apache-2.0
"""Stored pairs of a layer stream by stream, for methods that choose among all pairs without copying them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import Logits, Partial, group_queries
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


@dataclass(frozen=True)
class StreamPairs:
    """Some pairs of every stream, flat, stream by stream; the newest of each are those of a pass."""

    keys: Tensor
    """Keys `[rows, D]`."""
    values: Tensor
    """Values `[rows, Dv]`."""
    lengths: list[int]
    """Pairs of each stream."""

    @classmethod
    def of(cls, parts: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> StreamPairs:
        """Copy the pairs of each stream from its parts, `(keys [n, D], values [n, Dv])`."""
        keys, values = (torch.cat([pair[side] for stream in parts for pair in stream]) for side in (0, 1))
        return cls(keys, values, [sum(len(keys) for keys, _ in stream) for stream in parts])

    def operands(self) -> tuple[kernels.Rows, kernels.Ranges]:
        """Return the pairs as operands of kernels."""
        count = torch.tensor(self.lengths, device=self.keys.device)
        where = kernels.Ranges(count.cumsum(0) - count, count, longest=max(self.lengths))
        return kernels.Rows(kernels.Dense(self.keys), kernels.Dense(self.values)), where

    def attend(self, queries: Tensor, logits: Logits, sinks: Tensor | None) -> Partial:
        """Attend from the `queries [B, Hq, Q, D]` of the pass to its own pairs, causally, and to all others.

        Returns:
            Outputs `[N, G * Q, Dv]` and log-sum-exp `[N, G * Q]`, with the learned sinks.
        """
        new, streams = queries.shape[2], len(self.lengths)
        if sinks is not None:
            sinks = spread_sinks(sinks, queries, streams)
        options = kernels.Options(logits.scale, logits.softcap, causal=new, sinks=sinks)
        return kernels.decode(group_queries(queries, streams // len(queries)), *self.operands(), options)


def spread_sinks(sinks: Tensor, queries: Tensor, streams: int) -> Tensor:
    """Repeat learned sinks `[Hq]` for the query rows of every stream, `[N, G * Q]`; `queries` are `[B, Hq, Q, D]`."""
    batch, new = len(queries), queries.shape[2]
    return sinks.float().repeat_interleave(new).view(streams // batch, -1).repeat(batch, 1)
