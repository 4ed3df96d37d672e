# SPDX-License-Identifier: Apache-2.0
"""Chunks of a draft's cache, chosen by the attention of the target (`RetrievedChunks`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvpress.cache.attention import Logits, group_queries, merge
from kvpress.cache.chosen import Chosen, Selection, for_tokens
from kvpress.cache.codec import DenseCodec
from kvpress.cache.segment import Segment
from kvpress.cache.store import KVStore
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.selector import Selector
from kvpress.observe.call import LayerCall
from kvpress.speculation.forms import RetrievedChunks

CHOICE = "chunks that the target chose"


@dataclass
class Choice:
    """The tokens `read`, bool `[B, T]`, of those that had been seen when it was made; all later ones are read besides.

    `rows` are those of the segments of every layer, with how many pairs each held.
    """

    read: Tensor
    rows: dict[int, tuple[list[int], Selection]] = field(default_factory=dict)

    def put(self, cache: Any) -> None:
        """Make it what is read of a cache from now on."""
        cache.__dict__.setdefault("_kvpress_shared", {})[CHOICE] = self

    def of(self, layer: int, segments: list[Segment], heads: int) -> Selection:
        """Return what every stream of a layer reads."""
        held = [segment.layout.total for segment in segments]
        if layer not in self.rows or self.rows[layer][0] != held:
            parts = [self._marked(segment, heads) for segment in segments]
            everything = all(bool(marked.all()) for marked in parts)
            chosen = [_listed(segment, marked) for segment, marked in zip(segments, parts, strict=True)]
            self.rows[layer] = held, None if everything else [chosen]
        return self.rows[layer][1]

    def _marked(self, segment: Segment, heads: int) -> Tensor:
        read = self.read.to(segment.device)
        slots, rows = segment.slots().long(), segment.layout.stream_of_row.to(segment.device) // heads
        return (slots >= read.shape[1]) | read[rows, slots.clamp_max(read.shape[1] - 1)]


def _listed(segment: Segment, marked: Tensor) -> Chosen:
    """Return the marked pairs of every stream, as flat rows."""
    streams = segment.layout.stream_of_row.to(marked.device)
    found = marked.nonzero().flatten()
    counts = torch.bincount(streams[found], minlength=segment.layout.streams)
    rows = found.new_zeros(len(counts), max(1, int(counts.max())))
    rows[torch.arange(rows.shape[1], device=rows.device) < counts[:, None]] = found
    return Chosen(rows, counts)


def choose(form: RetrievedChunks, mask: Tensor, scores: Tensor | None = None) -> Choice:
    """Choose the chunks with the largest mean of `scores [B, T]`, the newest ones without; the newest chunk is always read.

    `mask [B, T]` marks real tokens: those of a chunk are counted without padding.
    """
    place = mask.long().cumsum(dim=1) - 1
    chunk, real = (place // form.chunk).clamp_min(0), mask.float()
    scores = place.float() if scores is None else scores
    count = int(chunk.max()) + 1
    sums, sizes = (real.new_zeros(len(mask), count).scatter_add_(1, chunk, each) for each in (scores * real, real))
    means = (sums / sizes.clamp_min(1)).masked_fill(sizes == 0, -torch.inf)
    means.scatter_(1, chunk[:, -1:], torch.inf)
    best = means.topk(min(form.chunks, count), dim=1)
    taken = torch.zeros_like(means, dtype=torch.bool).scatter_(1, best.indices, best.values > -torch.inf)
    return Choice(taken.gather(1, chunk) & mask.bool())


class ChunkSelector(Selector):
    """Reads the chunks that were chosen for a cache; see `RetrievedChunks`."""

    def __init__(self, chunk: int) -> None:
        self.sealing = DenseCodec(group=chunk, residual=chunk)

    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        del first
        choice: Choice | None = call.tokens.shared.get(CHOICE)
        found = None if choice is None else choice.of(call.layer.index, call.store.segments, call.store.heads)
        tokens = len(queries) // (call.store.batch * call.store.heads)
        if found is None or tokens == 1:
            return found
        return [[Chosen(for_tokens(p.rows, tokens), for_tokens(p.counts, tokens)) for p in parts] for parts in found]


@dataclass
class ChunkPress(BasePress):
    """Reads the chunks that were chosen for a cache, and the newest tokens."""

    chunk: int = 32

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        del model
        selector = ChunkSelector(self.chunk)
        return Recipe(selector=lambda layer: selector)


def attention_of(query: Tensor, store: KVStore, logits: Logits, mask: Tensor) -> Tensor:
    """Return the attention that every token of a layer gets from one `query [B, Hq, 1, D]`, summed over heads: `[B, seen]`.

    Tokens that are not stored any more get none. `mask [B, seen]` marks real tokens.
    """
    rows = group_queries(query, store.heads)
    parts: list[Segment] = list(store.sealed)
    if store.window.length:
        parts.append(store.window.segment(mask.bool()))
    _, lse = merge([part.attend(rows, logits) for part in parts])
    received = torch.zeros(store.batch, store.seen, device=query.device)
    for part in parts:
        row = part.layout.stream_of_row.to(query.device) // store.heads
        received.index_put_((row, part.slots().long().to(query.device)), part.mass(rows, logits, lse), accumulate=True)
    return received
