# SPDX-License-Identifier: Apache-2.0
"""Twilight: read only those of a selector's pairs that hold most of the attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from kvpress.cache.segment import Segment
from kvpress.cache.selection import Chosen, Selection
from kvpress.cache.store import KVStore
from kvpress.core.checks import Range
from kvpress.core.registry import Refusal, register
from kvpress.core.selector import Selector, spans_of
from kvpress.observe.call import LayerCall
from kvpress.sparse.around import SelectorAround, SelectorWrapperPress
from kvpress.sparse.labels import Labels


@register(
    "twilight",
    "select",
    "Lin et al., 2025, arXiv:2502.02770",
    example="twilight(quest:budget=1024):p=0.9",
    refuses=(
        Refusal("twilight(snapkv:0.5)", "it selects nothing"),
        Refusal("twilight(tidal_decode)", "layers that choose for later layers read everything"),
        Refusal(
            "twilight(sparq)", "the mean that stands for unread pairs would be counted twice; use mean_value=false"
        ),
        Refusal("twilight(kivi + quest)", "write the codec outside: kivi + twilight(quest)"),
    ),
)
@dataclass
class TwilightPress(SelectorWrapperPress):
    """Read the fewest pairs that hold the share `p` of the attention to the pairs of another selector.

        w = softmax over the chosen pairs t of scale * q . k'_t,    read the largest w until their sum reaches p

    k' is a copy of the keys in `bits` bits, with a scale and zero point for each key, stored in addition to the pairs. So a
    head that attends to one pair reads one, and a head that attends to all pairs reads all that the inner selector chose. With
    p = 1, every head reads all of them. `p` is the share of the attention, estimated from k', that the pairs read hold; closer
    to 1, more pairs are read. `press` is any selector; give it a large budget. Every query head chooses its pairs, and a group
    reads the union. Pairs that the inner selector always reads (`n_sink`, `n_recent`) are always read, and pairs that are not
    sealed yet are read in addition.

    Paper: Lin et al., Twilight: Adaptive Attention Sparsity with Hierarchical Top-p Pruning, 2025, arXiv:2502.02770.
    Differs from the paper: pairs are sorted by their weights, where its kernel searches for a threshold; shares are over the
    chosen sealed pairs; the inner selector decides which layers read everything (`skip_layers`).
    """

    p: Annotated[float, Range(0, 1, above=True)] = 0.85
    bits: Literal[2, 4, 8] = 4

    def around(self, selector: Selector) -> TwilightSelector:
        return TwilightSelector(selector, self.p, self.bits)


class TwilightSelector(SelectorAround):
    """Prunes the pairs that another selector chooses; see `TwilightPress`."""

    def __init__(self, inner: Selector, share: float, bits: int) -> None:
        super().__init__(inner, 1024)
        self.share, self.bits = share, bits
        # Copies of different widths are stored apart: a cache may have been read with another press before.
        self.copy_name = f"twilight {bits}"

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        parameter = 4 if dtype == torch.float32 else 2
        return super().index_bytes(pairs, dim, dtype) + pairs * (dim * self.bits / 8 + 2 * parameter)

    def prepare(self, store: KVStore) -> None:
        super().prepare(store)
        for segment in store.segments:
            self._copy(segment)

    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        segments = call.store.segments
        if not segments:
            return None
        selection = self.inner.choose(call, queries, first)
        if self.share >= 1:
            # Rounded weights may sum to 1 too early, and would drop pairs with a large true weight.
            return selection
        sets = [[_everything(segment, queries) for segment in segments]] if selection is None else selection
        heads = queries.split(queries.shape[1] // len(sets), dim=1)
        return [
            self._prune(call, segments, set_queries, chosen) for set_queries, chosen in zip(heads, sets, strict=True)
        ]

    def _prune(
        self, call: LayerCall, segments: Sequence[Segment], queries: Tensor, chosen: Sequence[Chosen]
    ) -> list[Chosen]:
        """Return the chosen pairs of every segment that hold the attention of `queries [q * N, g, D]`."""
        read = list(zip(segments, chosen, strict=True))
        logits = torch.cat([self._logits(call, segment, queries, pairs) for segment, pairs in read], dim=2)
        forced = torch.cat(self._forced(segments, chosen), dim=1)
        kept = top_share(logits.softmax(dim=-1), self.share).any(dim=1) | forced
        masks = kept.split([pairs.rows.shape[1] for pairs in chosen], dim=1)
        return [_narrow(pairs, mask) for pairs, mask in zip(chosen, masks, strict=True)]

    def _logits(self, call: LayerCall, segment: Segment, queries: Tensor, chosen: Chosen) -> Tensor:
        """Return estimated logits `[q * N, g, K]`, -inf past the chosen pairs."""
        rows = chosen.rows.long()
        keys = self._copy(segment).rows.read(rows.flatten()).view(*rows.shape, -1)
        weight = None if segment.log_weight is None else segment.log_weight[rows]
        logits = call.logits(queries.float(), keys, weight)
        return logits.masked_fill(~chosen.is_filled[:, None], -torch.inf)

    def _forced(self, segments: Sequence[Segment], chosen: Sequence[Chosen]) -> list[Tensor]:
        """Mark the chosen pairs that are always read, bool `[q * N, K]` of every segment."""
        first, last = (0, 0) if self.budget is None else (self.budget.first, self.budget.last)
        spans = [spans_of(segment.layout, pairs.rows) for segment, pairs in zip(segments, chosen, strict=True)]
        total = torch.stack([length for _, length in spans]).sum(dim=0)
        base, masks = torch.zeros_like(total), []
        for (start, length), pairs in zip(spans, chosen, strict=True):
            rank = pairs.rows - (start - base)[:, None]
            masks.append(((rank < first) | (rank >= (total - last)[:, None])) & pairs.is_filled)
            base = base + length
        return masks

    def _copy(self, segment: Segment) -> Labels:
        """Return the quantised copy of all keys of a segment."""
        copy: Labels | None = segment.index.get(self.copy_name)
        if copy is None:
            copy = segment.index[self.copy_name] = Labels.build(segment, lambda keys, _: keys, self.bits)
        return copy


def top_share(weights: Tensor, share: float) -> Tensor:
    """Mark the fewest of the `weights [..., K]`, whose sum is 1, that add up to a share; the largest is always marked."""
    order = weights.sort(dim=-1, descending=True, stable=True)
    before = order.values.double().cumsum(dim=-1) - order.values
    enough = (before < share) & (order.values > 0)
    return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, order.indices, enough)


def _everything(segment: Segment, queries: Tensor) -> Chosen:
    """Return all pairs of a segment as chosen."""
    starts, lengths = spans_of(segment.layout, queries)
    rank = torch.arange(segment.layout.longest, device=queries.device)
    return Chosen((starts[:, None] + rank).masked_fill(rank >= lengths[:, None], 0), lengths)


def _narrow(chosen: Chosen, kept: Tensor) -> Chosen:
    """Return the chosen pairs that are marked. Rows are shortened, except on a GPU, where that would wait for the device."""
    counts = kept.sum(dim=1)
    order = (~kept).to(torch.uint8).argsort(dim=1, stable=True)
    if not counts.is_cuda:
        order = order[:, : max(1, int(counts.max()))]
    rows = chosen.rows.gather(1, order)
    return Chosen(rows.masked_fill(torch.arange(rows.shape[1], device=rows.device) >= counts[:, None], 0), counts)
