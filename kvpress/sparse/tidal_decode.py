# SPDX-License-Identifier: Apache-2.0
"""TidalDecode: choose positions in two layers for every token, and read only those in all others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kvpress.cache.attention import group_queries
from kvpress.cache.codec import DenseCodec
from kvpress.cache.segment import Segment
from kvpress.cache.selection import Chosen, Selection, by_token, for_tokens, joined
from kvpress.core.checks import Size, check_count
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import PassHook, Recipe
from kvpress.core.registry import register
from kvpress.core.selector import RESIDUAL, TILE, Budget, Selector, spans_of
from kvpress.observe.call import LayerCall
from kvpress.observe.passes import Pass
from kvpress.sparse.base import SelectorPress

RESELECT = 0.4
"""Default of the layer that chooses again, as a fraction of the number of layers: 13 of 32."""

NOWHERE = torch.iinfo(torch.int32).max
"""Slot that no pair has."""
_SHARED = "tidal_decode"


@register("tidal_decode", "select", "Yang et al., 2024, arXiv:2410.05076", example="tidal_decode:budget=1024")
@dataclass
class TidalDecodePress(SelectorPress):
    """Choose the positions with the largest logits in one layer for every token, and read them in the layers that follow.

    Layers before `skip_layers` read everything. Layer `skip_layers` reads everything too and chooses the `budget` best sealed
    positions; so does `reselect_layer`. All other layers read their pairs at the positions that were chosen last:

        layer      0 .. s-1   s                s+1 .. c-1     c                c+1 ..
        reads      all        all, choose      the positions  all, choose      the new positions

    Here s = `skip_layers` and c = `reselect_layer`. By default c is 0.4 times the number of layers, 13 of 32; `kvpress
    reselect` finds the best layer for a model. If one of these layers has no growing cache, the next layer that has one takes
    its place. `heads` sets the unit of the choice: "mean" and "max" choose for each KV head, by the mean or maximum of the
    attention weights over its query heads; "query" chooses for each query head, so that a KV head reads up to G times as many
    pairs. Every `correction` generated tokens (0: never), the newest ones are read again with full attention and their pairs
    overwritten, so that errors of the sparse layers do not add up in the cache. A token that a head has evicted or encoded
    since, and all tokens before it, are not read again. All rows of a batch read the same number of tokens again, so with
    evictions during decoding, the corrected tokens of a row may depend on the other rows.

    Paper: Yang et al., TidalDecode: Fast and Accurate LLM Decoding with Position Persistent Sparse Attention, 2024,
    arXiv:2410.05076.
    Differs from the paper: its code has one set per query head and no grouped queries ("query" is the same); pairs that
    are not sealed yet are always read, so that a token always sees itself. A layer whose pair at a chosen position
    was evicted reads no pair there.
    """

    skip_layers: Size = 2
    reselect_layer: int | None = None
    heads: Literal["mean", "max", "query"] = "mean"
    correction: Size = 0

    def validate(self) -> None:
        super().validate()
        if self.reselect_layer is not None:
            check_count("reselect_layer", self.reselect_layer, least=self.skip_layers + 1)

    def selector_at(self, layer: int) -> TidalDecodeSelector | None:
        if layer < self.skip_layers:
            return None
        return TidalDecodeSelector(self.limits, self.reselect_layer, self.heads, self.correction)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if model is not None and self.correction and len(model.growing) < model.depth:
            raise NotImplementedError(
                f"correction={self.correction} reads tokens again, but {model.name} has layers whose caches cannot remove "
                "tokens; use correction=0"
            )
        if model is not None and self.reselect_layer is not None and model.growing:
            last = model.growing[-1].index
            if self.reselect_layer > last:
                raise ValueError(
                    f"reselect_layer must be at most {last}, the last layer of {model.name} whose cache grows, got "
                    f"{self.reselect_layer}: no later layer would choose again; `kvpress reselect` finds the best layer"
                )
        hooks = (PassHook(self._correct, ("decode",), reads=True, first=True),) if self.correction else ()
        return replace(super().recipe(model), hooks=hooks)

    def _correct(self, finished: Pass) -> None:
        """Read the newest generated tokens again with full attention, every `correction` of them."""
        generated = 0 if finished.ids is None else finished.ids.shape[1]
        if generated and generated % self.correction == 0:
            tokens = min(self.correction, finished.rereadable_tokens)
            if tokens:
                finished.reread(tokens)


@dataclass(frozen=True)
class ChosenPositions:
    """Pairs that one layer chose for the new tokens of a pass."""

    layer: int
    """Index of the layer."""
    seen: int
    """Tokens that the layer had seen, to recognise the pass."""
    tokens: int
    """New tokens of the pass."""
    segments: list[Segment]
    """Segments of the layer, which the selection refers to."""
    selection: Selection
    """Chosen pairs; None for all."""


class TidalDecodeSelector(Selector):
    """Chooses positions, or reads the positions that were chosen last; see `TidalDecodePress`."""

    def __init__(self, budget: Budget, reselect_layer: int | None, heads: str, correction: int) -> None:
        self.budget, self.reselect_layer, self.heads = budget, reselect_layer, heads
        # Tokens that are read again must not be sealed.
        self.sealing = DenseCodec(TILE, residual=max(RESIDUAL, correction))

    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        if self._selects(call):
            return None
        positions: ChosenPositions = call.tokens.shared[_SHARED]
        if positions.selection is None:
            return None
        selection = positions.selection
        if positions.tokens > 1:
            start = first * call.store.batch * call.store.heads
            streams = slice(start, start + len(queries))
            selection = [[pairs.of_tokens(streams) for pairs in chosen] for chosen in selection]
        segments = itertools.zip_longest(positions.segments, call.store.segments)
        if all(theirs and ours and same_slots(theirs, ours) for theirs, ours in segments):
            return selection
        return [self._translate(positions.segments, chosen, call.store.segments) for chosen in selection]

    def _translate(self, theirs: list[Segment], chosen: Sequence[Chosen], ours: list[Segment]) -> list[Chosen]:
        """Return the pairs of our segments at the chosen positions of another layer.

        A stream within the budget is chosen in full. Where the other layer's stream and ours both are, ours is read in full,
        also at positions that the other layer evicted.
        """
        slots = [_slots(segment, pairs) for segment, pairs in zip(theirs, chosen, strict=True)]
        positions = torch.cat(slots, dim=1).sort(dim=1).values
        matches = [_find(segment, positions) for segment in ours]
        counts = [sum(lengths) for lengths in zip(*(segment.layout.lengths for segment in theirs), strict=True)]
        if all(self.budget.of(count) < count for count in counts):
            return matches
        is_full = self._fits(theirs, positions) & self._fits(ours, positions)
        return [_widen(segment, pairs, is_full) for segment, pairs in zip(ours, matches, strict=True)]

    def _fits(self, segments: list[Segment], positions: Tensor) -> Tensor:
        """Mark the query streams of `positions [q * N, K]` whose pairs in the segments are within the budget."""
        counts = torch.stack([spans_of(segment.layout, positions)[1] for segment in segments]).sum(dim=0)
        return self.budget.of_each(counts) >= counts

    def after(self, call: LayerCall) -> None:
        if self._selects(call) and not call.store.segments:
            call.tokens.shared[_SHARED] = ChosenPositions(
                call.layer.index, call.store.seen, call.queries.shape[2], [], None
            )
        elif self._selects(call):
            tokens = call.queries.shape[2]
            queries = by_token(group_queries(call.queries, call.store.heads), tokens)
            lse = by_token(call.whole_lse, tokens)
            selection = joined([self._best(call, queries[block], lse[block]) for block in self.blocks(call)])
            call.tokens.shared[_SHARED] = ChosenPositions(
                call.layer.index, call.store.seen, tokens, list(call.store.segments), selection
            )
        if call.layer.depth + 1 == call.layer.depths:
            # The last layer frees the positions, which are large for many tokens.
            call.tokens.shared.pop(_SHARED, None)

    def _selects(self, call: LayerCall) -> bool:
        last: ChosenPositions | None = call.tokens.shared.get(_SHARED)
        current = call.store.seen, call.queries.shape[2]
        if last is None or (last.seen, last.tokens) != current or last.layer >= call.layer.index:
            return True  # first layer of this pass
        reselect = round(RESELECT * call.layer.count) if self.reselect_layer is None else self.reselect_layer
        return last.layer < reselect <= call.layer.index

    def _best(self, call: LayerCall, queries: Tensor, lse: Tensor) -> Selection:
        """Return the choice from the attention weights of some tokens' `queries [q, N, G, D]`."""
        layouts = [segment.layout for segment in call.store.segments]
        if self.heads == "mean":
            scores = self._weights(call, queries, lse)
        else:
            heads = list(zip(queries.split(1, dim=2), lse.split(1, dim=2), strict=True))
            if self.heads == "query":
                best_of_heads = [self.budget.best(self._weights(call, *head), layouts) for head in heads]
                chosen = [best for best in best_of_heads if best is not None]
                return chosen or None
            scores = self._weights(call, *heads[0])
            for head in heads[1:]:
                scores = [torch.maximum(*pair) for pair in zip(scores, self._weights(call, *head), strict=True)]
        best = self.budget.best(scores, layouts)
        return None if best is None else [best]

    def _weights(self, call: LayerCall, queries: Tensor, lse: Tensor) -> list[Tensor]:
        """Return the attention that sealed pairs receive from each token's `queries [q, N, m, D]`, summed over m.

        The result is `[q * N, longest]` for each segment, -inf past the end of a stream. Tokens are computed one by one,
        because `Segment.mass` sums over all queries.
        """
        weights = []
        for segment in call.store.segments:
            tokens = [
                segment.layout.pad(segment.mass(token_queries, call.logits, token_lse), -torch.inf)
                for token_queries, token_lse in zip(queries, lse, strict=True)
            ]
            weights.append(tokens[0] if len(tokens) == 1 else torch.cat(tokens))
        return weights


def same_slots(a: Segment, b: Segment) -> bool:
    """Whether two segments surely hold the same tokens in every stream: both are contiguous and begin and end alike."""
    return a.contiguous and b.contiguous and a.first == b.first and a.layout.lengths == b.layout.lengths


def _cached_slots(segment: Segment) -> Tensor:
    """Return the slots of all pairs, cached in the segment because every step reads them."""
    slots: Tensor | None = segment.index.get("slots")
    if slots is None:
        slots = segment.index["slots"] = segment.slots()
    return slots


def _slots(segment: Segment, chosen: Chosen) -> Tensor:
    """Return the slots `[q * N, K]` of chosen pairs, filled with `NOWHERE`, a slot that no pair has."""
    if segment.contiguous:
        starts, _ = spans_of(segment.layout, chosen.rows)
        tokens = len(starts) // segment.layout.streams
        slots = chosen.rows - starts[:, None] + for_tokens(segment.first_slot(), tokens)[:, None]
    else:
        slots = _cached_slots(segment)[chosen.rows]
    past = torch.arange(slots.shape[1], device=slots.device) >= chosen.counts[:, None]
    return slots.int().masked_fill(past, NOWHERE)


def _find(segment: Segment, slots: Tensor) -> Chosen:
    """Return the pairs of a segment whose slots are among the ascending `slots [q * N, K]`."""
    starts, lengths = segment.layout.on(slots.device)
    streams, width = len(starts), slots.shape[1]
    # Stream by stream, `[N, q * K]`, so that the slots of a stream are searched once for all tokens.
    targets = slots.view(-1, streams, width).transpose(0, 1).reshape(streams, -1)
    if segment.contiguous:
        ranks = targets - segment.first_slot()[:, None]
        exists = (ranks >= 0) & (ranks < lengths[:, None])
    else:
        stored = segment.layout.pad(_cached_slots(segment), NOWHERE)
        ranks = torch.searchsorted(stored, targets)
        exists = (ranks < lengths[:, None]) & (stored.gather(1, ranks.clamp_max(stored.shape[1] - 1)) == targets)
    rows = (starts[:, None] + ranks).masked_fill(~exists, 0)
    rows, exists = (t.view(streams, -1, width).transpose(0, 1).reshape(-1, width) for t in (rows, exists))
    order = exists.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : segment.layout.longest]
    return Chosen(rows.gather(1, order), exists.sum(dim=1))


def _widen(segment: Segment, chosen: Chosen, is_full: Tensor) -> Chosen:
    """Return all pairs of a segment for the query streams marked by `is_full [q * N]`, else the chosen ones."""
    starts, lengths = spans_of(segment.layout, chosen.rows)
    ranks = torch.arange(segment.layout.longest, device=starts.device)
    rows = (starts[:, None] + ranks).masked_fill(ranks >= lengths[:, None], 0)
    narrow = torch.nn.functional.pad(chosen.rows, (0, segment.layout.longest - chosen.rows.shape[1]))
    return Chosen(torch.where(is_full[:, None], rows, narrow), torch.where(is_full, lengths, chosen.counts))
