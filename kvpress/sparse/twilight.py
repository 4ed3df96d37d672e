# SPDX-License-Identifier: Apache-2.0
"""Twilight: of what a selector would read, only the pairs that hold most of the attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from kvpress.cache.chosen import Chosen, Selection
from kvpress.cache.codec import Codec
from kvpress.cache.segment import Segment
from kvpress.cache.store import KVStore
from kvpress.core.checks import Range
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Refusal, register
from kvpress.core.selector import Selector, spans_of
from kvpress.observe.call import LayerCall
from kvpress.sparse.labels import Labels

COPY = "twilight"


@register(
    "twilight",
    "select",
    "Lin et al., 2025, arXiv:2502.02770",
    example="twilight(quest:budget=1024):p=0.9",
    refuses=(
        Refusal("twilight(snapkv:0.5)", "it selects nothing"),
        Refusal("twilight(tidal_decode)", "layers that choose for others read everything"),
        Refusal(
            "twilight(sparq)", "the mean that stands for what is not read would be counted twice; with mean_value=false"
        ),
        Refusal("twilight(kivi + quest)", "a codec stands beside it: kivi + twilight(quest)"),
    ),
)
@dataclass
class TwilightPress(BasePress):
    """Read as few of the pairs that another selector chooses as hold the share `p` of their attention.

        w = softmax over the chosen pairs t of scale * q . k'_t,    read the largest w until their sum reaches p

    k' is a copy of the keys in `bits` bits, with a scale and zero for each, that is kept beside the pairs. So a head that looks
    at one pair reads one, and one that looks everywhere reads all that the selector inside chose, as every head does with
    p = 1: give `press`, any selector, a large budget. Every query head chooses for itself, and those of a group read what any
    of them chose. The oldest and newest pairs that the selector inside always reads (`n_sink`, `n_recent`) stay, and pairs
    that are not sealed yet are read besides.

    Paper: Lin et al., Twilight: Adaptive Attention Sparsity with Hierarchical Top-p Pruning, 2025, arXiv:2502.02770.
    Differs from the paper: pairs are sorted by their weights, where its kernel searches for a threshold; shares are those
    of the chosen sealed pairs; which layers read everything is up to the selector inside (`skip_layers`).
    """

    press: BasePress
    p: Annotated[float, Range(0, 1, above=True)] = 0.85
    bits: Literal[2, 4, 8] = 4

    def validate(self) -> None:
        super().validate()
        if not isinstance(self.press, BasePress):
            raise TypeError(
                f"TwilightPress needs a selector, such as QuestPress(budget=1024), got {type(self.press).__name__}"
            )
        self.press.validate()
        self.recipe()

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        inner, name = self.press.recipe(model), type(self.press).__name__
        choose = inner.selector
        if choose is None or inner.codec is not None or inner.evictions or inner.offloads:
            raise TypeError(
                f"TwilightPress needs a selector alone, such as QuestPress(budget=1024), got {name}; what evicts, encodes or "
                "offloads stands beside it"
            )

        def at(layer: int) -> Selector | None:
            found = choose(layer)
            if found is None:
                return None
            if found.adds or type(found).after is not Selector.after:
                what = (
                    "adds an estimate of what it does not read" if found.adds else "learns where layers read everything"
                )
                raise TypeError(f"TwilightPress cannot prune what {name} reads, which {what}")
            return TwilightSelector(found, self.p, self.bits)

        if model is not None:
            for layer in model.growing:
                at(layer.index)
        return Recipe(selector=at, pattern=inner.pattern, observers=inner.observers, hooks=inner.hooks)


class TwilightSelector(Selector):
    """Prunes what another selector chooses; see `TwilightPress`."""

    def __init__(self, inner: Selector, share: float, bits: int) -> None:
        self.inner, self.share, self.bits = inner, share, bits
        self.unit, self.score_bytes = inner.unit, inner.score_bytes + inner.unit * 1024

    @property
    def sealing(self) -> Codec:  # type: ignore[override]
        """That of the selector inside."""
        return self.inner.sealing

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        parameter = 4 if dtype == torch.float32 else 2
        return self.inner.index_bytes(pairs, dim, dtype) + pairs * (dim * self.bits / 8 + 2 * parameter)

    def prepare(self, store: KVStore) -> None:
        self.inner.prepare(store)
        for segment in store.segments:
            self._copy(segment)

    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        segments = call.store.segments
        if not segments:
            return None
        found = self.inner.choose(call, queries, first)
        if self.share >= 1:
            return found  # sums of estimated weights come to 1 before the last of them, and what they estimate may be large
        sets = [[_everything(segment, queries) for segment in segments]] if found is None else found
        heads = queries.split(queries.shape[1] // len(sets), dim=1)
        return [self._prune(call, segments, asking, chosen) for asking, chosen in zip(heads, sets, strict=True)]

    def _prune(
        self, call: LayerCall, segments: Sequence[Segment], queries: Tensor, chosen: Sequence[Chosen]
    ) -> list[Chosen]:
        """Return the part of what is chosen that `queries [q * N, g, D]` look at, in every segment."""
        read = list(zip(segments, chosen, strict=True))
        logits = torch.cat([self._logits(call, segment, queries, part) for segment, part in read], dim=2)
        forced = torch.cat(self._forced(segments, chosen), dim=1)
        kept = top_share(logits.softmax(dim=-1), self.share).any(dim=1) | forced
        masks = kept.split([part.rows.shape[1] for part in chosen], dim=1)
        return [_narrow(part, mask) for part, mask in zip(chosen, masks, strict=True)]

    def _logits(self, call: LayerCall, segment: Segment, queries: Tensor, chosen: Chosen) -> Tensor:
        """Estimated logits `[q * N, g, K]`, -inf past what is chosen."""
        rows = chosen.rows.long()
        keys = self._copy(segment).rows.read(rows.flatten()).view(*rows.shape, -1)
        weight = None if segment.log_weight is None else segment.log_weight[rows]
        logits = call.logits(queries.float(), keys, weight)
        return logits.masked_fill(~_real(chosen)[:, None], -torch.inf)

    def _forced(self, segments: Sequence[Segment], chosen: Sequence[Chosen]) -> list[Tensor]:
        """Mark what is always read, `[q * N, K]` of every segment."""
        budget = getattr(self.inner, "budget", None)
        first, last = (0, 0) if budget is None else (budget.first, budget.last)
        spans = [spans_of(segment.layout, part.rows) for segment, part in zip(segments, chosen, strict=True)]
        total = torch.stack([length for _, length in spans]).sum(dim=0)
        base, found = torch.zeros_like(total), []
        for (start, length), part in zip(spans, chosen, strict=True):
            rank = part.rows - (start - base)[:, None]
            found.append(((rank < first) | (rank >= (total - last)[:, None])) & _real(part))
            base = base + length
        return found

    def _copy(self, segment: Segment) -> Labels:
        """Return all keys of a segment in few bits."""
        copy: Labels | None = segment.index.get(COPY)
        if copy is None:
            copy = segment.index[COPY] = Labels.build(segment, lambda keys, _: keys, self.bits)
        return copy


def top_share(weights: Tensor, share: float) -> Tensor:
    """Mark the fewest of the `weights [..., K]`, which add up to 1, that reach a share together; the largest always."""
    order = weights.sort(dim=-1, descending=True, stable=True)
    before = order.values.double().cumsum(dim=-1) - order.values
    enough = (before < share) & (order.values > 0)
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, order.indices, enough)


def _everything(segment: Segment, queries: Tensor) -> Chosen:
    """Return a choice of all pairs of a segment."""
    starts, lengths = spans_of(segment.layout, queries)
    place = torch.arange(segment.layout.longest, device=queries.device)
    return Chosen((starts[:, None] + place).masked_fill(place >= lengths[:, None], 0), lengths)


def _real(chosen: Chosen) -> Tensor:
    return torch.arange(chosen.rows.shape[1], device=chosen.rows.device) < chosen.counts[:, None]


def _narrow(chosen: Chosen, kept: Tensor) -> Chosen:
    """Return what is marked of a choice; the rest of its rows, which nobody reads, is cut off where that costs no waiting."""
    counts = kept.sum(dim=1)
    order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)
    if not counts.is_cuda:
        order = order[:, : max(1, int(counts.max()))]
    rows = chosen.rows.gather(1, order)
    return Chosen(rows.masked_fill(torch.arange(rows.shape[1], device=rows.device) >= counts[:, None], 0), counts)
