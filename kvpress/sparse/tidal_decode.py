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
from kvpress.cache.chosen import Chosen, Selection, by_token, for_tokens, joined
from kvpress.cache.codec import DenseCodec
from kvpress.cache.segment import Segment
from kvpress.core.checks import Size, check_count
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import PassHook, Recipe
from kvpress.core.registry import register
from kvpress.core.selector import RESIDUAL, TILE, Budget, Selector, spans_of
from kvpress.observe.call import LayerCall
from kvpress.observe.passes import Pass
from kvpress.sparse.base import SelectorPress

RESELECT = 0.4
"""Where positions are chosen again if nobody says: as a fraction of the layers, 13 of 32."""

NOWHERE = torch.iinfo(torch.int32).max
_SHARED = "tidal_decode"


@register("tidal_decode", "select", "Yang et al., 2024, arXiv:2410.05076", example="tidal_decode:budget=1024")
@dataclass
class TidalDecodePress(SelectorPress):
    """Choose the positions with the largest logits in one layer for every token, and read them in the layers that follow.

    Layers before `skip_layers` read everything. Layer `skip_layers` reads everything too and chooses the `budget` best sealed
    positions; so does `reselect_layer`. All other layers read their own pairs at the positions chosen last:

        layer      0 .. s-1   s                s+1 .. c-1     c                c+1 ..
        reads      all        all, choose      the positions  all, choose      the new positions

    With s = `skip_layers` and c = `reselect_layer`; by default c is 0.4 times the number of layers, 13 of 32, and
    `kvpress reselect` finds the best one for a model. In models where some layers hold no growing cache, the next layer
    that does takes their place. `heads` says for whom positions are chosen: "mean" and "max" for each kv head, by the
    mean or maximum of the attention weights over its query heads; "query" for each query head, which reads up to as many times
    more. Every `correction` generated tokens (0: never), the newest ones are read again with full attention and their
    pairs overwritten, so that errors of the sparse layers do not pile up in the cache. Of tokens that a head evicted or
    encoded meanwhile, neither they nor the older ones are read again: fewer tokens then, or none. All rows of a batch read as
    many again, so with evictions while tokens are generated, which tokens of a row are corrected may depend on the other rows.

    Paper: Yang et al., TidalDecode: Fast and Accurate LLM Decoding with Position Persistent Sparse Attention, 2024,
    arXiv:2410.05076.
    Differs from the paper: its code has one set per query head and no grouped queries ("query" is the same); pairs that
    are not sealed yet are always read, so that a token always sees itself. A layer whose pair at a chosen position
    was evicted does not read one there.
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
                f"{model.name} has layers whose caches cannot take back tokens, so none can be read again: use correction=0"
            )
        hooks = (PassHook(self._correct, ("decode",), reads=True, first=True),) if self.correction else ()
        return replace(super().recipe(model), hooks=hooks)

    def _correct(self, done: Pass) -> None:
        """Read the newest generated tokens again with full attention, every `correction` of them."""
        generated = 0 if done.ids is None else done.ids.shape[1]
        if generated and generated % self.correction == 0:
            tokens = min(self.correction, done.rereadable_tokens)
            if tokens:
                done.reread(tokens)


@dataclass(frozen=True)
class Positions:
    """What one layer chose for the `tokens` new tokens of a pass, of its own segments."""

    layer: int
    seen: int
    tokens: int
    segments: list[Segment]
    selection: Selection


class TidalDecodeSelector(Selector):
    """Chooses positions, or reads those that were chosen last; see `TidalDecodePress`."""

    def __init__(self, budget: Budget, reselect_layer: int | None, heads: str, correction: int) -> None:
        self.budget, self.reselect_layer, self.heads = budget, reselect_layer, heads
        # What is read again must not be sealed yet.
        self.sealing = DenseCodec(TILE, residual=max(RESIDUAL, correction))

    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        if self._selects(call):
            return None
        found: Positions = call.tokens.shared[_SHARED]
        if found.selection is None:
            return None
        selection = found.selection
        if found.tokens > 1:
            start = first * call.store.batch * call.store.heads
            asked = slice(start, start + len(queries))
            selection = [[part.of_tokens(asked) for part in chosen] for chosen in selection]
        pairs = itertools.zip_longest(found.segments, call.store.segments)
        if all(one and other and same_slots(one, other) for one, other in pairs):
            return selection
        return [self._translate(found.segments, chosen, call.store.segments) for chosen in selection]

    def _translate(self, theirs: list[Segment], chosen: Sequence[Chosen], ours: list[Segment]) -> list[Chosen]:
        """Find the pairs of our segments at the chosen positions of another layer.

        Where that layer chose all of a stream, which says nothing, ours is read whole too if it fits into the budget.
        """
        slots = [_slots(segment, part) for segment, part in zip(theirs, chosen, strict=True)]
        wanted = torch.cat(slots, dim=1).sort(dim=1).values
        found = [_find(segment, wanted) for segment in ours]
        held = [sum(lengths) for lengths in zip(*(segment.layout.lengths for segment in theirs), strict=True)]
        if all(self.budget.of(count) < count for count in held):
            return found
        whole = self._fits(theirs, wanted) & self._fits(ours, wanted)
        return [_widen(segment, part, whole) for segment, part in zip(ours, found, strict=True)]

    def _fits(self, segments: list[Segment], wanted: Tensor) -> Tensor:
        """Mark the query streams of `wanted [q * N, K]` whose pairs in some segments are no more than the budget."""
        counts = torch.stack([spans_of(segment.layout, wanted)[1] for segment in segments]).sum(dim=0)
        return self.budget.of_each(counts) >= counts

    def after(self, call: LayerCall) -> None:
        if self._selects(call) and not call.store.segments:
            call.tokens.shared[_SHARED] = Positions(call.layer.index, call.store.seen, call.queries.shape[2], [], None)
        elif self._selects(call):
            tokens = call.queries.shape[2]
            queries = by_token(group_queries(call.queries, call.store.heads), tokens)
            lse = by_token(call.whole_lse, tokens)
            selection = joined([self._best(call, queries[block], lse[block]) for block in self.blocks(call)])
            call.tokens.shared[_SHARED] = Positions(
                call.layer.index, call.store.seen, tokens, list(call.store.segments), selection
            )
        if call.layer.depth + 1 == call.layer.depths:
            # No layer follows that would read them; what many tokens chose is large.
            call.tokens.shared.pop(_SHARED, None)

    def _selects(self, call: LayerCall) -> bool:
        last: Positions | None = call.tokens.shared.get(_SHARED)
        now = call.store.seen, call.queries.shape[2]
        if last is None or (last.seen, last.tokens) != now or last.layer >= call.layer.index:
            return True  # the first layer of this pass
        again = round(RESELECT * call.layer.count) if self.reselect_layer is None else self.reselect_layer
        return last.layer < again <= call.layer.index

    def _best(self, call: LayerCall, queries: Tensor, lse: Tensor) -> Selection:
        """Choose from the attention weights of some tokens' `queries [q, N, G, D]`."""
        layouts = [segment.layout for segment in call.store.segments]
        if self.heads == "mean":
            scores = self._weights(call, queries, lse)
        else:
            pairs = list(zip(queries.split(1, dim=2), lse.split(1, dim=2), strict=True))
            if self.heads == "query":
                found = [self.budget.best(self._weights(call, *head), layouts) for head in pairs]
                chosen = [parts for parts in found if parts is not None]
                return chosen or None
            scores = self._weights(call, *pairs[0])
            for head in pairs[1:]:
                scores = [torch.maximum(*both) for both in zip(scores, self._weights(call, *head), strict=True)]
        best = self.budget.best(scores, layouts)
        return None if best is None else [best]

    def _weights(self, call: LayerCall, queries: Tensor, lse: Tensor) -> list[Tensor]:
        """Attention that every sealed pair receives from each token's `queries [q, N, m, D]`, summed over m.

        Returns `[q * N, longest]` per segment. Tokens are taken one by one: the mass of a pair is a sum over all queries.
        """
        found = []
        for segment in call.store.segments:
            tokens = [
                segment.layout.pad(segment.mass(asking, call.logits, total), -torch.inf)
                for asking, total in zip(queries, lse, strict=True)
            ]
            found.append(tokens[0] if len(tokens) == 1 else torch.cat(tokens))
        return found


def same_slots(one: Segment, other: Segment) -> bool:
    """Whether two segments are known to hold the same tokens in every stream."""
    return (
        one.contiguous and other.contiguous and one.first == other.first and one.layout.lengths == other.layout.lengths
    )


def _listed(segment: Segment) -> Tensor:
    """Slots of all pairs, held with the segment: every step reads them."""
    slots: Tensor | None = segment.index.get("slots")
    if slots is None:
        slots = segment.index["slots"] = segment.slots()
    return slots


def _slots(segment: Segment, chosen: Chosen) -> Tensor:
    """Slots `[q * N, K]` of chosen pairs; past their number one that no pair has."""
    if segment.contiguous:
        starts, _ = spans_of(segment.layout, chosen.rows)
        tokens = len(starts) // segment.layout.streams
        slots = chosen.rows - starts[:, None] + for_tokens(segment.first_slot(), tokens)[:, None]
    else:
        slots = _listed(segment)[chosen.rows]
    past = torch.arange(slots.shape[1], device=slots.device) >= chosen.counts[:, None]
    return slots.int().masked_fill(past, NOWHERE)


def _find(segment: Segment, slots: Tensor) -> Chosen:
    """The pairs at those of the ascending `slots [q * N, K]` that a segment holds."""
    starts, lengths = segment.layout.on(slots.device)
    streams, wanted = len(starts), slots.shape[1]
    # Stream by stream, `[N, q * K]`: the positions of a stream are looked at once for all tokens.
    asked = slots.view(-1, streams, wanted).transpose(0, 1).reshape(streams, -1)
    if segment.contiguous:
        ranks = asked - segment.first_slot()[:, None]
        held = (ranks >= 0) & (ranks < lengths[:, None])
    else:
        known = segment.layout.pad(_listed(segment), NOWHERE)
        ranks = torch.searchsorted(known, asked)
        held = (ranks < lengths[:, None]) & (known.gather(1, ranks.clamp_max(known.shape[1] - 1)) == asked)
    rows = (starts[:, None] + ranks).masked_fill(~held, 0)
    rows, held = (of.view(streams, -1, wanted).transpose(0, 1).reshape(-1, wanted) for of in (rows, held))
    order = held.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : segment.layout.longest]
    return Chosen(rows.gather(1, order), held.sum(dim=1))


def _widen(segment: Segment, chosen: Chosen, whole: Tensor) -> Chosen:
    """Choose all pairs of a segment for the query streams that `whole [q * N]` marks."""
    starts, lengths = spans_of(segment.layout, chosen.rows)
    ranks = torch.arange(segment.layout.longest, device=starts.device)
    rows = (starts[:, None] + ranks).masked_fill(ranks >= lengths[:, None], 0)
    known = torch.nn.functional.pad(chosen.rows, (0, segment.layout.longest - chosen.rows.shape[1]))
    return Chosen(torch.where(whole[:, None], rows, known), torch.where(whole, lengths, chosen.counts))
