"""TidalDecode: choose positions in two layers of a decode step, and read only those in all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvpress.attention import group_queries
from kvpress.cache.segment import Segment
from kvpress.checks import check_count
from kvpress.context import LayerCall, Phase
from kvpress.passes import Pass
from kvpress.quant.base import DenseCodec
from kvpress.registry import register
from kvpress.sparse.base import RESIDUAL, TILE, Budget, Chosen, Selector, SelectorPress, Sets

HEADS = ("mean", "max", "query")
RESELECT = 0.4
"""Where positions are chosen again if nobody says: as a fraction of the layers, 13 of 32."""

NOWHERE = torch.iinfo(torch.int32).max
_SHARED = "tidal_decode"


@register("tidal_decode", "select", "Yang et al., 2024, arXiv:2410.05076")
@dataclass
class TidalDecodePress(SelectorPress):
    """Choose the positions with the largest logits in one layer per decode step, and read them in the layers that follow.

    Layers before `skip_layers` read everything. Layer `skip_layers` reads everything too and chooses the `budget` best sealed
    positions; so does `reselect_layer`. All other layers read their own pairs at the positions chosen last:

        layer      0 .. s-1   s                s+1 .. c-1     c                c+1 ..
        reads      all        all, choose      the positions  all, choose      the new positions

    With s = `skip_layers` and c = `reselect_layer`; by default c is 0.4 times the number of layers, 13 of 32, and
    `kvpress reselect` finds the best one for a model. In models where some layers hold no growing cache, the next layer
    that does takes their place. `heads` says for whom positions are chosen: "mean" and "max" for each kv head, by the
    mean or maximum of the attention weights over its query heads; "query" for each query head, which reads up to as many times
    more. Every `correction` generated tokens (0: never), the newest ones are read again with full attention and their
    pairs overwritten, so that errors of the sparse layers do not pile up in the cache.

    Paper: Yang et al., TidalDecode: Fast and Accurate LLM Decoding with Position Persistent Sparse Attention, 2024,
    arXiv:2410.05076.
    Differs from the paper: its code has one set per query head and no grouped queries ("query" is the same); pairs that
    are not sealed yet are always read, so that a token always sees itself. A layer whose pair at a chosen position
    was evicted does not read one there.
    """

    skip_layers: int = 2
    reselect_layer: int | None = None
    heads: Literal["mean", "max", "query"] = "mean"
    correction: int = 0

    def validate(self) -> None:
        super().validate()
        check_count("skip_layers", self.skip_layers, least=0)
        check_count("correction", self.correction, least=0)
        if self.heads not in HEADS:
            raise ValueError(f"heads must be one of {HEADS}, got {self.heads!r}")
        if self.reselect_layer is not None:
            check_count("reselect_layer", self.reselect_layer, least=self.skip_layers + 1)

    def selector_at(self, layer: int) -> TidalDecodeSelector | None:
        if layer < self.skip_layers:
            return None
        return TidalDecodeSelector(self.limits, self.reselect_layer, self.heads, self.correction)

    @property
    def follows(self) -> tuple[Phase, ...]:
        return ("decode",) if self.correction else ()

    def after_pass(self, done: Pass) -> None:
        generated = 0 if done.ids is None else done.ids.shape[1]
        if generated and generated % self.correction == 0:
            done.reread(min(self.correction, done.open_tokens))


@dataclass(frozen=True)
class Positions:
    """What one layer chose in one decode step, of its own segments: one list for each set of query heads."""

    layer: int
    seen: int
    segments: list[Segment]
    sets: Sets


class TidalDecodeSelector(Selector):
    """Chooses positions, or reads those that were chosen last; see `TidalDecodePress`."""

    def __init__(self, budget: Budget, reselect_layer: int | None, heads: str, correction: int) -> None:
        self.budget, self.reselect_layer, self.heads = budget, reselect_layer, heads
        # What is read again must not be sealed yet.
        self.sealing = DenseCodec(TILE, residual=max(RESIDUAL, correction))

    def choose(self, call: LayerCall, queries: Tensor) -> Sets:
        if self._selects(call):
            return None
        found: Positions = call.shared[_SHARED]
        if found.sets is None or all(map(same_columns, found.segments, call.store.segments)):
            return found.sets
        return [_translate(found.segments, chosen, call.store.segments) for chosen in found.sets]

    def after(self, call: LayerCall) -> None:
        if self._selects(call):
            sets = self._best(call, group_queries(call.queries, call.store.heads))
            call.shared[_SHARED] = Positions(call.layer, call.store.seen, list(call.store.segments), sets)

    def _selects(self, call: LayerCall) -> bool:
        last: Positions | None = call.shared.get(_SHARED)
        if last is None or last.seen != call.store.seen or last.layer >= call.layer:
            return True  # the first layer of this step
        again = round(RESELECT * call.layers) if self.reselect_layer is None else self.reselect_layer
        return last.layer < again <= call.layer

    def _best(self, call: LayerCall, queries: Tensor) -> Sets:
        """Choose from the attention weights of `queries [N, G, D]`."""
        segments = call.store.segments
        layouts = [segment.layout for segment in segments]
        if self.heads == "mean":
            sets = [self._weights(call, queries, call.whole_lse)]
        else:
            pairs = zip(queries.split(1, dim=1), call.whole_lse.split(1, dim=1), strict=True)
            sets = [self._weights(call, *head) for head in pairs]
        if self.heads == "max":
            sets = [[torch.stack(heads).amax(dim=0) for heads in zip(*sets, strict=True)]]
        chosen = [self.budget.best(scores, layouts) for scores in sets]
        return None if chosen[0] is None else [part for part in chosen if part is not None]

    def _weights(self, call: LayerCall, queries: Tensor, lse: Tensor) -> list[Tensor]:
        """Attention that every sealed pair receives, summed over the queries `[N, m, D]`: `[N, longest]` per segment."""
        return [
            segment.layout.pad(segment.mass(queries, call.logits, lse), -torch.inf) for segment in call.store.segments
        ]


def same_columns(one: Segment, other: Segment) -> bool:
    """Whether two segments are known to hold the same tokens in every stream."""
    return (
        one.positions is None
        and other.positions is None
        and one.first == other.first
        and one.layout.lengths == other.layout.lengths
    )


def _translate(theirs: Sequence[Segment], chosen: Sequence[Chosen], ours: Sequence[Segment]) -> list[Chosen]:
    """Find the pairs of our segments that lie at the chosen positions of another layer."""
    columns = [_columns(segment, part) for segment, part in zip(theirs, chosen, strict=True)]
    wanted = torch.cat(columns, dim=1).sort(dim=1).values
    return [_find(segment, wanted) for segment in ours]


def _columns(segment: Segment, chosen: Chosen) -> Tensor:
    """Columns `[N, K]` of chosen pairs; past their number one that no pair has."""
    starts, _ = segment.layout.on(chosen.rows.device)
    if segment.positions is None:
        columns = chosen.rows - starts[:, None] + segment.first_column()[:, None]
    else:
        columns = segment.positions[chosen.rows]
    past = torch.arange(columns.shape[1], device=columns.device) >= chosen.counts[:, None]
    return columns.int().masked_fill(past, NOWHERE)


def _find(segment: Segment, columns: Tensor) -> Chosen:
    """The pairs at those of the ascending `columns [N, K]` that a segment holds."""
    starts, lengths = segment.layout.on(columns.device)
    if segment.positions is None:
        ranks = columns - segment.first_column()[:, None]
        held = (ranks >= 0) & (ranks < lengths[:, None])
    else:
        known = segment.layout.pad(segment.positions, NOWHERE)
        ranks = torch.searchsorted(known, columns)
        held = (ranks < lengths[:, None]) & (known.gather(1, ranks.clamp_max(known.shape[1] - 1)) == columns)
    order = held.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : segment.layout.longest]
    rows = (starts[:, None] + ranks).masked_fill(~held, 0).gather(1, order)
    return Chosen(rows, held.sum(dim=1))
