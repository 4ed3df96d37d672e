# SPDX-License-Identifier: Apache-2.0
"""Chunks of a draft's cache, chosen by the attention of the target (`RetrievedChunks`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvpress.cache.attention import Logits, group_queries, merge
from kvpress.cache.codec import DenseCodec
from kvpress.cache.segment import Segment
from kvpress.cache.selection import Chosen, Selection, for_tokens
from kvpress.cache.store import KVStore
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.selector import Selector
from kvpress.observe.call import LayerCall
from kvpress.speculation.forms import RetrievedChunks

CHOICE = "chunks that the target chose"


@dataclass
class ChunkChoice:
    """Tokens that the draft reads, until the next choice."""

    read: Tensor
    """Mask of the tokens that had been seen at the choice, bool `[B, T]`; later tokens are always read."""
    rows: dict[int, tuple[list[int], Selection]] = field(default_factory=dict)
    """Selection of each layer, with the number of pairs in each of its segments."""

    def put(self, cache: Any) -> None:
        """Apply the choice to later passes with a cache."""
        cache.__dict__.setdefault("_kvpress_shared", {})[CHOICE] = self

    def of(self, layer: int, segments: list[Segment], heads: int) -> Selection:
        """Return the selection of a layer; None for all pairs."""
        lengths = [segment.layout.total for segment in segments]
        if layer not in self.rows or self.rows[layer][0] != lengths:
            masks = [self._marked(segment, heads) for segment in segments]
            everything = all(bool(mask.all()) for mask in masks)
            chosen = [_listed(segment, mask) for segment, mask in zip(segments, masks, strict=True)]
            self.rows[layer] = lengths, None if everything else [chosen]
        return self.rows[layer][1]

    def _marked(self, segment: Segment, heads: int) -> Tensor:
        """Return the mask of the pairs of a segment that are read, bool `[total]`."""
        read = self.read.to(segment.device)
        slots, rows = segment.slots().long(), segment.layout.stream_of_row.to(segment.device) // heads
        return (slots >= read.shape[1]) | read[rows, slots.clamp_max(read.shape[1] - 1)]


def _listed(segment: Segment, marked: Tensor) -> Chosen:
    """Return the marked pairs of every stream, as flat rows."""
    streams = segment.layout.stream_of_row.to(marked.device)
    chosen = marked.nonzero().flatten()
    counts = torch.bincount(streams[chosen], minlength=segment.layout.streams)
    rows = chosen.new_zeros(len(counts), max(1, int(counts.max())))
    rows[torch.arange(rows.shape[1], device=rows.device) < counts[:, None]] = chosen
    return Chosen(rows, counts)


def choose(form: RetrievedChunks, mask: Tensor, scores: Tensor | None = None) -> ChunkChoice:
    """Choose the chunks with the largest mean of `scores [B, T]`, or the newest chunks if `scores` is None.

    The newest chunk is always read. Chunks count the real tokens, which `mask [B, T]` marks.
    """
    position = mask.long().cumsum(dim=1) - 1
    chunk, real = (position // form.chunk).clamp_min(0), mask.float()
    scores = position.float() if scores is None else scores
    count = int(chunk.max()) + 1
    sums, sizes = (real.new_zeros(len(mask), count).scatter_add_(1, chunk, terms) for terms in (scores * real, real))
    means = (sums / sizes.clamp_min(1)).masked_fill(sizes == 0, -torch.inf)
    means.scatter_(1, chunk[:, -1:], torch.inf)
    best = means.topk(min(form.chunks, count), dim=1)
    is_chosen = torch.zeros_like(means, dtype=torch.bool).scatter_(1, best.indices, best.values > -torch.inf)
    return ChunkChoice(is_chosen.gather(1, chunk) & mask.bool())


class ChunkSelector(Selector):
    """Selects the chunks that `ChunkChoice.put` stored with a cache; see `RetrievedChunks`."""

    def __init__(self, chunk: int) -> None:
        self.sealing = DenseCodec(group=chunk, residual=chunk)

    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        del first
        choice: ChunkChoice | None = call.tokens.shared.get(CHOICE)
        selection = None if choice is None else choice.of(call.layer.index, call.store.segments, call.store.heads)
        tokens = len(queries) // (call.store.batch * call.store.heads)
        if selection is None or tokens == 1:
            return selection
        return [
            [Chosen(for_tokens(p.rows, tokens), for_tokens(p.counts, tokens)) for p in parts] for parts in selection
        ]


@dataclass
class RetrievedChunkPress(BasePress):
    """Press that reads the chosen chunks of a cache, and the newest tokens."""

    chunk: int = 32

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        del model
        selector = ChunkSelector(self.chunk)
        return Recipe(selector=lambda layer: selector)


def attention_of(query: Tensor, store: KVStore, logits: Logits, mask: Tensor) -> Tensor:
    """Return the attention of one `query [B, Hq, 1, D]` to every token of a layer, summed over heads: `[B, seen]`.

    Tokens that were evicted get 0. `mask [B, seen]` marks real tokens.
    """
    rows = group_queries(query, store.heads)
    segments: list[Segment] = list(store.sealed)
    if store.window.length:
        segments.append(store.window.segment(mask.bool()))
    _, lse = merge([segment.attend(rows, logits) for segment in segments])
    received = torch.zeros(store.batch, store.seen, device=query.device)
    for segment in segments:
        row, slots = segment.layout.stream_of_row.to(query.device) // store.heads, segment.slots().long()
        received.index_put_((row, slots.to(query.device)), segment.mass(rows, logits, lse), accumulate=True)
    return received
