# SPDX-License-Identifier: Apache-2.0
"""Stored pairs of a layer stream by stream, for methods that choose among all pairs without copying them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
    """Some pairs of every stream, those of a pass last; each stream ends at the same column."""

    keys: Tensor
    """Keys `[S, width, D]`; columns before the pairs of a stream are not read."""
    values: Tensor
    """Values `[S, width, Dv]`."""
    where: kernels.Ranges
    """Flat rows of each stream."""

    @classmethod
    def of(cls, parts: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> StreamPairs:
        """Copy the pairs of each stream from its parts, `(keys [n, D], values [n, Dv])`."""
        keys, values = (
            pad_sequence(
                [torch.cat([pair[side] for pair in stream]) for stream in parts], batch_first=True, padding_side="left"
            )
            for side in (0, 1)
        )
        counts = [sum(len(keys) for keys, _ in stream) for stream in parts]
        return cls(keys, values, ranges(counts, keys.shape[1], keys.device))

    @classmethod
    def of_pass(cls, keys: Tensor, values: Tensor, parts: int) -> StreamPairs:
        """Return the pairs `keys [B, H, parts * m, D]` and `values` of a pass, as one stream for each head and part."""
        keys, values = (side.unflatten(2, (parts, -1)).flatten(0, 2) for side in (keys, values))
        return cls(keys, values, ranges([keys.shape[1]] * len(keys), keys.shape[1], keys.device))

    def rows(self) -> kernels.Rows:
        """Return the pairs as an operand of kernels, flat."""
        return kernels.Rows(kernels.Dense(self.keys.flatten(0, 1)), kernels.Dense(self.values.flatten(0, 1)))

    def attend(self, queries: Tensor, logits: Logits, sinks: Tensor | None, parts: int = 1) -> Partial:
        """Attend from the `queries [B, Hq, parts * m, D]` of each part of a pass to its pairs, causally, and to all others.

        Streams are those of rows, heads and parts, in this order.

        Returns:
            Outputs `[N, G * parts * m, Dv]` and log-sum-exp `[N, G * parts * m]`, with the learned sinks.
        """
        new = queries.shape[2] // parts
        heads = len(self.keys) // (len(queries) * parts)
        if sinks is not None:
            sinks = split_parts(spread_sinks(sinks, queries, len(queries) * heads), parts, new)
        options = kernels.Options(logits.scale, logits.softcap, causal=new, sinks=sinks)
        grouped = split_parts(group_queries(queries, heads), parts, new)
        out, lse = kernels.decode(grouped, self.rows(), self.where, options)
        return join_parts(out, parts, new), join_parts(lse, parts, new)


def ranges(counts: Sequence[int], width: int, device: torch.device) -> kernels.Ranges:
    """Return the flat rows of streams of `width` columns, of which each fills the last `counts[n]`."""
    count = torch.tensor(counts)
    starts = torch.arange(1, len(count) + 1) * width - count
    return kernels.Ranges(starts.to(device), count.to(device), longest=max(counts))


def split_parts(per_query: Tensor, parts: int, new: int) -> Tensor:
    """Rearrange `[N, G * parts * new, ...]`, of the queries of streams, to `[N * parts, G * new, ...]`."""
    if parts == 1:
        return per_query
    by_part: Tensor = per_query.unflatten(1, (-1, parts, new)).transpose(1, 2)
    return by_part.flatten(2, 3).flatten(0, 1)


def join_parts(per_query: Tensor, parts: int, new: int) -> Tensor:
    """Undo `split_parts`."""
    if parts == 1:
        return per_query
    by_group: Tensor = per_query.unflatten(1, (-1, new)).unflatten(0, (-1, parts)).transpose(1, 2)
    return by_group.flatten(1, 3)


def spread_sinks(sinks: Tensor, queries: Tensor, streams: int) -> Tensor:
    """Repeat learned sinks `[Hq]` for the query rows of every stream, `[N, G * Q]`; `queries` are `[B, Hq, Q, D]`."""
    batch, new = len(queries), queries.shape[2]
    return sinks.float().repeat_interleave(new).view(streams // batch, -1).repeat(batch, 1)
