# SPDX-License-Identifier: Apache-2.0
"""Base class of selectors, their budget, and the choice of the best entries of a stream over all its segments."""

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
from kvpress.cache.segment import Segment
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
from kvpress.kernels import Listed, Part, Ranges, split_rows, top_rows
from kvpress.observe.call import LayerCall

TILE = 64
"""Pairs sealed at a time without a codec."""
RESIDUAL = 16
"""Newest pairs that stay unsealed without a codec."""


class Selector(ABC):
    """Chooses, for every new token at one layer, the pairs of the sealed segments that it reads.

    Each token of a pass gets the choice that it would get in a pass of its own; all sealed pairs come before all tokens of the
    pass. The dense tail and the open window are always read. The choice must depend only on the sealed pairs of a stream and
    their order, not on their split into segments, which depends on the other rows of the batch.
    """

    sealing: Codec = DenseCodec(group=TILE, residual=RESIDUAL)
    """Codec that seals pairs into tiles for the index if the press has no codec."""
    looks_ahead: bool = False
    """`prefetch` gets queries of this layer while the layer before it runs."""
    adds: bool = False
    """The attention includes an estimate of the part of the pairs that are not read."""
    unit: int = 1
    """Number of pairs that are chosen together."""
    score_bytes: int = 32
    """Temporary memory per score while entries are chosen, in bytes."""

    @abstractmethod
    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        """Return the pairs of `call.store.segments` that q tokens of a pass read; None for all pairs.

        The choice between None and a selection must depend on the stored pairs only, not on the queries.

        Args:
            call: the layer and its stored pairs.
            queries: `[q * N, G, D]`, token by token (`kvpress.cache.selection`).
            first: index of the first of the tokens in the pass.

        Returns:
            Sets of chosen pairs; each set serves an equal share of the G query heads.
        """

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        """Return the bytes of the index over `pairs` sealed pairs of one head."""
        del pairs, dim, dtype
        return 0

    def prepare(self, store: KVStore) -> None:  # noqa: B027 - not every selector has an index
        """Index the sealed pairs of a layer, so that its memory is reported and the first query need not wait."""

    def attend(self, call: LayerCall, queries: Tensor) -> Sequence[Partial | Part]:
        """Attend from `queries [N, G * Q, D]` to the chosen pairs of `call.store.segments`; store the choice in `call.read`.

        Tokens choose in blocks, which bounds the memory of scores. Pairs that one token chose are returned as parts, where an
        operator can read them together with the other pairs of the layer.
        """
        tokens = call.queries.shape[2]
        if tokens == 1:
            call.read = self._checked_choice(call, queries)
            operands = self._operands(call, queries)
            return self.attend_to(call, queries, call.read) if operands is None else operands
        token_queries, streams = by_token(queries, tokens), len(queries)
        read: list[Selection] = []
        parts: list[list[Partial]] = []
        for block in self.blocks(call):
            block_queries = token_queries[block].flatten(0, 1)
            selection = self._checked_choice(call, block_queries, block.start)
            if selection is None:
                call.read = None
                return self.attend_to(call, queries, None)
            parts.append(self.attend_to(call, block_queries, selection))
            read.append([[Chosen(pairs.rows.int(), pairs.counts) for pairs in heads] for heads in selection])
        call.read = joined(read)
        return [
            (by_stream([out for out, _ in blocks], streams), by_stream([lse for _, lse in blocks], streams))
            for blocks in zip(*parts, strict=True)
        ]

    def _checked_choice(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        """Return the selection of `choose`.

        Raises:
            TypeError: `choose` returns neither None nor a selection.
            ValueError: a selection has rows for another number of query streams.
        """
        selection, segments = self.choose(call, queries, first), call.store.segments
        if selection is None:
            return None
        name = f"{type(self).__name__}.choose"
        if (
            not isinstance(selection, (list, tuple))
            or not selection
            or not all(_is_set(s, segments) for s in selection)
        ):
            raise TypeError(
                f"{name} must return None or a list of sets of pairs, each a list with one Chosen for each of the "
                f"{len(segments)} segments, got {_shown(selection)}"
            )
        if wrong_sets := [pairs for pair_sets in selection for pairs in pair_sets if len(pairs.rows) != len(queries)]:
            streams = segments[0].layout.streams
            raise ValueError(
                f"{name} must choose rows for {len(queries)} query streams, {len(queries) // streams} tokens of {streams} "
                f"streams, got rows for {len(wrong_sets[0].rows)}: repeat data per stream by for_tokens"
            )
        return selection

    def _operands(self, call: LayerCall, queries: Tensor) -> list[Part] | None:
        """Return the pairs of `call.read` as parts; None where `attend_to` has more to do than to read them."""
        segments, selection = call.store.segments, call.read
        if self.adds or selection is None or len(selection) != 1:
            return None
        parts: list[Part] = []
        for segment, pairs in zip(segments, selection[0], strict=True):
            part = segment.chosen_part(queries, call.logits, pairs.rows, pairs.counts)
            if part is None:
                return None
            parts.append(part)
        if fetched := fetched_bytes(segments, selection):
            call.store.fetched += fetched
        return parts

    def attend_to(self, call: LayerCall, queries: Tensor, selection: Selection) -> list[Partial]:
        """Attend from `queries [q * N, G, D]` to the selected pairs, or from `[N, M, D]` to all pairs if `selection` is None.

        Selectors with `adds` append their estimate here as one more partial result.
        """
        segments = call.store.segments
        if fetched := fetched_bytes(segments, selection):
            call.store.fetched += fetched
        if selection is None:
            return [segment.attend(queries, call.logits) for segment in segments]
        if len(selection) == 1:
            return [
                attend_chosen(segment, queries, call.logits, pairs)
                for segment, pairs in zip(segments, selection[0], strict=True)
            ]
        heads = queries.split(queries.shape[1] // len(selection), dim=1)
        parts = []
        for i, segment in enumerate(segments):
            read = [
                attend_chosen(segment, head_queries, call.logits, chosen[i])
                for head_queries, chosen in zip(heads, selection, strict=True)
            ]
            outs, lses = zip(*read, strict=True)
            parts.append((torch.cat(outs, dim=1), torch.cat(lses, dim=1)))
        return parts

    def blocks(self, call: LayerCall) -> list[slice]:
        """Split the new tokens of a pass into blocks whose scores fit in `attention.BLOCK_BYTES`."""
        tokens, store = call.queries.shape[2], call.store
        if tokens == 1:
            return [slice(0, 1)]
        entries = sum(segment.layout.longest for segment in store.segments) * store.batch * store.heads // self.unit
        step = max(1, attention.BLOCK_BYTES // (self.score_bytes * max(1, entries)))
        return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]

    def prefetch(self, store: KVStore, queries: Tensor) -> None:
        """Start to fetch the pairs that a layer will read, from a guess of one token's `queries [N, G, D]`.

        Called only if `looks_ahead` is set.
        """
        raise NotImplementedError

    def after(self, call: LayerCall) -> None:  # noqa: B027 - optional
        """Update state after the attention of a pass of this layer."""


@dataclass(frozen=True)
class Budget:
    """Number of sealed pairs of a stream that a token reads."""

    size: float
    """Number of pairs (int), or fraction of the stored pairs (float), rounded up."""
    first: int = 0
    """First pairs of the stream that are always read, part of `size`."""
    last: int = 0
    """Last sealed pairs of the stream that are always read, part of `size`."""

    def of(self, stored: int, unit: int = 1) -> int:
        """Return how many of a stream's `stored` entries of `unit` pairs each are read, at least one."""
        forced = sum(self.forced(unit))
        count = self.size // unit if isinstance(self.size, int) else math.ceil(stored * self.size)
        return max(1, forced, count)

    def of_each(self, stored: Tensor, unit: int = 1) -> Tensor:
        """Return `of` for every stream of `stored [N]`, int64 [N], without a copy from the device."""
        counts = (
            stored.new_full((), self.size // unit)
            if isinstance(self.size, int)
            else (stored.double() * self.size).ceil()
        )
        return counts.long().expand(stored.shape).clamp_min(max(1, sum(self.forced(unit))))

    def forced(self, unit: int = 1) -> tuple[int, int]:
        """Return the numbers of entries that are always read at the start and at the end of a stream."""
        return -(-self.first // unit), -(-self.last // unit)

    def best(self, scores: Sequence[Tensor], layouts: Sequence[Layout], unit: int = 1) -> list[Chosen] | None:
        """Return the entries with the largest scores over all segments for each query stream; None if all are read.

        Args:
            scores: float32 `[q * N, longest]` for each segment, -inf past the end of a stream.
            layouts: layout of the entries of the N streams in each segment: pairs, or pages of `unit` pairs.
            unit: pairs per entry.
        """
        if self.reads_all(layouts, unit):
            return None
        joint, starts, lengths = _join(scores, layouts)
        rows, counts = top_rows(joint, Ranges(starts, lengths), **self.arguments(lengths, layouts, unit))
        return [Chosen(rows, counts)] if len(layouts) == 1 else split_ranks(rows, counts, layouts)

    def reads_all(self, layouts: Sequence[Layout], unit: int = 1) -> bool:
        """Whether all entries of all streams are read."""
        counts = _entry_counts(layouts)
        return all(self.of(count, unit) >= count for count in counts)

    def arguments(self, lengths: Tensor, layouts: Sequence[Layout], unit: int = 1) -> dict[str, Any]:
        """Return the keyword arguments of `kvpress.kernels.top_rows` for query streams of `lengths` entries in `layouts`."""
        counts = {self.of(count, unit) for count in _entry_counts(layouts)}
        first, last = self.forced(unit)
        limits = self.of_each(lengths, unit) if len(counts) > 1 else None
        return {"k": max(counts), "first": first, "last": last, "limits": limits}


def _entry_counts(layouts: Sequence[Layout]) -> list[int]:
    """Return the number of entries of every stream in all layouts together."""
    return [sum(lengths) for lengths in zip(*(layout.lengths for layout in layouts), strict=True)]


def _join(scores: Sequence[Tensor], layouts: Sequence[Layout]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of all segments side by side without gaps, and the start and length of each query stream in them."""
    spans = [spans_of(layout, segment_scores) for layout, segment_scores in zip(layouts, scores, strict=True)]
    if len(layouts) == 1:
        return scores[0], *spans[0]
    lengths = torch.stack([segment_lengths for _, segment_lengths in spans]).sum(dim=0)
    starts = torch.zeros_like(lengths)
    if all(layout.uniform for layout in layouts):
        return torch.cat(list(scores), dim=1), starts, lengths
    joint = scores[0].new_full((len(lengths), sum(layout.longest for layout in layouts)), -torch.inf)
    base = torch.zeros_like(lengths)
    for entries, (_, entry_counts) in zip(scores, spans, strict=True):
        # Scores past the end of a stream are overwritten by the next segment, or stay -inf.
        joint.scatter_(1, base[:, None] + torch.arange(entries.shape[1], device=entries.device), entries)
        base = base + entry_counts
    return joint, starts, lengths


def split_ranks(ranks: Tensor, counts: Tensor, layouts: Sequence[Layout]) -> list[Chosen]:
    """Return the flat rows in each of several segments of the chosen ranks over all of them.

    `ranks [q * N, K]`, int32, are ascending; the first `counts[i]` of query stream i are chosen.
    """
    segments = [Ranges(*spans_of(layout, ranks)) for layout in layouts]
    found = split_rows(Listed(ranks, counts), segments, [layout.longest for layout in layouts])
    return [Chosen(rows, listed) for rows, listed in found]


def spans_of(layout: Layout, per_query: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first row and the length of the stream of each query stream of `per_query [q * N, ...]`, int64 [q * N]."""
    starts, lengths = layout.on(per_query.device)
    tokens = len(per_query) // layout.streams
    return for_tokens(starts, tokens), for_tokens(lengths, tokens)


def _is_set(chosen: Any, segments: Sequence[Segment]) -> bool:
    """Whether an entry of a selection has the chosen pairs of each segment."""
    return (
        isinstance(chosen, (list, tuple))
        and len(chosen) == len(segments)
        and all(isinstance(pairs, Chosen) for pairs in chosen)
    )


def _shown(selection: Any) -> str:
    """Return the types in a wrong selection."""
    if not isinstance(selection, (list, tuple)):
        return type(selection).__name__
    return f"[{', '.join(map(_shown, selection))}]"
