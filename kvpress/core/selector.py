# SPDX-License-Identifier: Apache-2.0
"""What a selector is, and what all of them share: a budget, and the best entries of a stream over all its segments."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpress.cache import attention
from kvpress.cache.attention import Partial
from kvpress.cache.codec import Codec, DenseCodec
from kvpress.cache.layout import Layout
from kvpress.cache.selection import (
    Chosen,
    Selection,
    attend_chosen,
    by_stream,
    by_token,
    fetched_bytes,
    for_tokens,
    joined,
)
from kvpress.cache.store import KVStore
from kvpress.kernels import Ranges, top_rows
from kvpress.observe.call import LayerCall

TILE = 64
"""Pairs that are sealed at a time where no codec says otherwise."""
RESIDUAL = 16
"""Newest pairs that are not sealed where no codec says otherwise."""


class Selector(ABC):
    """Chooses, for every new token at one layer, which pairs of the sealed segments it reads.

    Each token of a pass chooses for itself, as if it had come alone: all sealed pairs are earlier than any of them. The
    dense tail and the open window are always read. What is chosen depends on the sealed pairs of a stream and their order,
    not on the segments that hold them, which its neighbours in the batch have a part in. `sealing` says in what tiles pairs
    are sealed where no codec does it, so that they can be indexed.
    """

    sealing: Codec = DenseCodec(group=TILE, residual=RESIDUAL)
    looks_ahead: bool = False
    """Whether `prefetch` wants queries of this layer while the layer before it is still under way."""
    adds: bool = False
    """Whether an estimate of what the pairs that are not read would add is one more part of the attention."""
    unit: int = 1
    """Pairs that are chosen together."""
    score_bytes: int = 32
    """Memory for each score, by which entries are chosen, while that is done."""

    @abstractmethod
    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        """Return what some tokens of a pass, from the `first` on, read of `call.store.segments`.

        Their `queries [q * N, G, D]` come token by token (`kvpress.cache.selection`). Each set of a selection serves as many
        query heads. Whether everything is read depends on what is stored, not on the queries.
        """

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        """Bytes of the index over `pairs` sealed pairs of one head."""
        del pairs, dim, dtype
        return 0

    def prepare(self, store: KVStore) -> None:  # noqa: B027 - not every selector has an index
        """Index the sealed pairs of a layer, so that the memory of it shows and no query waits for it."""

    def attend(self, call: LayerCall, queries: Tensor) -> list[Partial]:
        """Attend from `queries [N, G * Q, D]` to the chosen pairs of `call.store.segments`, and leave them in `call.read`.

        Many tokens choose in blocks, so that no pass holds the scores of all of them.
        """
        tokens = call.queries.shape[2]
        if tokens == 1:
            call.read = self.choose(call, queries)
            return self.attend_to(call, queries, call.read)
        asking, streams = by_token(queries, tokens), len(queries)
        read: list[Selection] = []
        parts: list[list[Partial]] = []
        for block in self.blocks(call):
            some = asking[block].flatten(0, 1)
            selection = self.choose(call, some, block.start)
            if selection is None:
                call.read = None
                return self.attend_to(call, queries, None)
            parts.append(self.attend_to(call, some, selection))
            read.append([[Chosen(part.rows.int(), part.counts) for part in heads] for heads in selection])
        call.read = joined(read)
        return [
            (by_stream([out for out, _ in blocks], streams), by_stream([lse for _, lse in blocks], streams))
            for blocks in zip(*parts, strict=True)
        ]

    def attend_to(self, call: LayerCall, queries: Tensor, selection: Selection) -> list[Partial]:
        """Attend from `queries [q * N, G, D]` to what they chose, where everything is read from `[N, M, D]`.

        A selector that estimates what the pairs that are not read would add appends it here as one more part.
        """
        segments = call.store.segments
        if fetched := fetched_bytes(segments, selection):
            call.store.fetched += fetched
        if selection is None:
            return [segment.attend(queries, call.logits) for segment in segments]
        if len(selection) == 1:
            return [
                attend_chosen(segment, queries, call.logits, part)
                for segment, part in zip(segments, selection[0], strict=True)
            ]
        heads = queries.split(queries.shape[1] // len(selection), dim=1)
        parts = []
        for i, segment in enumerate(segments):
            read = [
                attend_chosen(segment, asking, call.logits, chosen[i])
                for asking, chosen in zip(heads, selection, strict=True)
            ]
            outs, lses = zip(*read, strict=True)
            parts.append((torch.cat(outs, dim=1), torch.cat(lses, dim=1)))
        return parts

    def blocks(self, call: LayerCall) -> list[slice]:
        """Cut the new tokens of a pass so that what it takes to choose for a block fits in `attention.BLOCK_BYTES`."""
        tokens, store = call.queries.shape[2], call.store
        if tokens == 1:
            return [slice(0, 1)]
        entries = sum(segment.layout.longest for segment in store.segments) * store.batch * store.heads // self.unit
        step = max(1, attention.BLOCK_BYTES // (self.score_bytes * max(1, entries)))
        return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]

    def prefetch(self, store: KVStore, queries: Tensor) -> None:
        """Send for what a layer will read, from a guess of one token's `queries [N, G, D]`; only where `looks_ahead`."""
        raise NotImplementedError

    def after(self, call: LayerCall) -> None:  # noqa: B027 - nor looks back
        """Look at a pass of this layer once its attention is known."""


@dataclass(frozen=True)
class Budget:
    """How many sealed pairs of a stream a token reads, the first `first` and the last `last` always among them.

    `size` is a number of pairs, or a fraction of those that the stream holds, rounded up.
    """

    size: float
    first: int = 0
    last: int = 0

    def of(self, held: int, unit: int = 1) -> int:
        """Return how many of a stream's `held` entries of `unit` pairs each are read, at least one."""
        forced = sum(self.forced(unit))
        wanted = self.size // unit if isinstance(self.size, int) else math.ceil(held * self.size)
        return max(1, forced, wanted)

    def of_each(self, held: Tensor, unit: int = 1) -> Tensor:
        """Return the same for many streams, int64 like `held`, without asking the device."""
        wanted = (
            held.new_full((), self.size // unit) if isinstance(self.size, int) else (held.double() * self.size).ceil()
        )
        return wanted.long().expand(held.shape).clamp_min(max(1, sum(self.forced(unit))))

    def forced(self, unit: int = 1) -> tuple[int, int]:
        """Return how many entries are always read at the start and at the end."""
        return -(-self.first // unit), -(-self.last // unit)

    def best(self, scores: Sequence[Tensor], layouts: Sequence[Layout], unit: int = 1) -> list[Chosen] | None:
        """Choose each query stream's entries with the largest scores over all segments; None if that is all of them.

        Args:
            scores: one float32 `[q * N, longest]` per segment, -inf past the end of a stream.
            layouts: where the entries of the N streams lie: pairs, or pages of `unit` pairs.
            unit: pairs per entry.
        """
        if self.reads_all(layouts, unit):
            return None
        joint, starts, lengths = _join(scores, layouts)
        rows, counts = top_rows(joint, Ranges(starts, lengths), **self.asked(lengths, layouts, unit))
        return [Chosen(rows, counts)] if len(layouts) == 1 else split_ranks(rows, counts, layouts)

    def reads_all(self, layouts: Sequence[Layout], unit: int = 1) -> bool:
        """Whether every stream's entries are all read."""
        held = _held(layouts)
        return all(self.of(count, unit) >= count for count in held)

    def asked(self, lengths: Tensor, layouts: Sequence[Layout], unit: int = 1) -> dict[str, Any]:
        """Return what `kvpress.kernels.top_rows` is to choose of query streams with so many entries in `layouts`."""
        wanted = {self.of(count, unit) for count in _held(layouts)}
        first, last = self.forced(unit)
        most = self.of_each(lengths, unit) if len(wanted) > 1 else None
        return {"k": max(wanted), "first": first, "last": last, "most": most}


def _held(layouts: Sequence[Layout]) -> list[int]:
    """How many entries every stream has in all layouts together."""
    return [sum(lengths) for lengths in zip(*(layout.lengths for layout in layouts), strict=True)]


def _join(scores: Sequence[Tensor], layouts: Sequence[Layout]) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of all segments side by side without gaps, the number of the first, and how many there are."""
    spans = [spans_of(layout, part) for layout, part in zip(layouts, scores, strict=True)]
    if len(layouts) == 1:
        return scores[0], *spans[0]
    lengths = torch.stack([own for _, own in spans]).sum(dim=0)
    starts = torch.zeros_like(lengths)
    if all(layout.uniform for layout in layouts):
        return torch.cat(list(scores), dim=1), starts, lengths
    joint = scores[0].new_full((len(lengths), sum(layout.longest for layout in layouts)), -torch.inf)
    base = torch.zeros_like(lengths)
    for part, (_, own) in zip(scores, spans, strict=True):
        # What lies past the end of a stream is overwritten by the next segment, or stays -inf.
        joint.scatter_(1, base[:, None] + torch.arange(part.shape[1], device=part.device), part)
        base = base + own
    return joint, starts, lengths


def split_ranks(ranks: Tensor, counts: Tensor, layouts: Sequence[Layout]) -> list[Chosen]:
    """Turn the first `counts[i]` of the `ranks [q * N, K]` over all segments, ascending, into flat rows of each segment."""
    place = torch.arange(ranks.shape[1], device=ranks.device)
    if len(layouts) == 1:
        rows = ranks + spans_of(layouts[0], ranks)[0][:, None]
        return [Chosen(rows.masked_fill(place >= counts[:, None], 0), counts)]
    ranks = ranks.masked_fill(place >= counts[:, None], torch.iinfo(ranks.dtype).max)
    base = torch.zeros_like(counts)
    chosen = []
    for layout in layouts:
        starts, lengths = spans_of(layout, ranks)
        low, high = torch.searchsorted(ranks, torch.stack([base, base + lengths], dim=1).to(ranks.dtype)).unbind(1)
        own = place[: layout.longest]
        rows = ranks.gather(1, (low[:, None] + own).clamp_max(ranks.shape[1] - 1)) + (starts - base)[:, None]
        chosen.append(Chosen(rows.masked_fill(own >= (high - low)[:, None], 0), high - low))
        base = base + lengths
    return chosen


def spans_of(layout: Layout, asked: Tensor) -> tuple[Tensor, Tensor]:
    """First row and length of the stream behind each query stream of `asked [q * N, ...]`, int64 [q * N] each."""
    starts, lengths = layout.on(asked.device)
    tokens = len(asked) // layout.streams
    return for_tokens(starts, tokens), for_tokens(lengths, tokens)
