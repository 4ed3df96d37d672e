# SPDX-License-Identifier: Apache-2.0
"""SparQ: choose pairs by the channels in which the query is large."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.cache.attention import Logits, Partial, merge
from kvpress.cache.layout import Layout
from kvpress.cache.segment import Segment
from kvpress.cache.selection import Chosen, Selection, for_tokens
from kvpress.cache.store import KVStore
from kvpress.core.checks import Count
from kvpress.core.registry import register
from kvpress.core.selector import Budget, Selector, spans_of
from kvpress.observe.call import LayerCall
from kvpress.sparse.base import SelectorPress

LIMITS = torch.finfo(torch.float32)
BLOCK = 2**22
"""Elements of keys that are copied at a time; allocating larger blocks is slow."""


@register("sparq", "select", "Ribar et al., 2023, arXiv:2312.04985", example="sparq:budget=256")
@dataclass
class SparQPress(SelectorPress):
    """Read the `budget` pairs with the largest attention weights, estimated from the `channels` largest channels of the query.

        share = softmax(scale * sqrt(|q|_1 / |q_r|_1) * q_r . k_r)      o = alpha * o_read + (1 - alpha) * mean(values)

    q_r are the r = `channels` channels (all, if the head dim is less) with the largest sum of |q| over the query heads of a
    group; alpha is the share of the pairs that are read, 1 without `mean_value`. `budget` is a number of pairs per stream, or a
    fraction in (0, 1) of the stored ones. Keys are stored twice, the second time channel by channel and unquantised: a step
    reads r channels of all keys.

    Paper: Ribar et al., SparQ Attention: Bandwidth-Efficient LLM Inference, 2023, arXiv:2312.04985.
    Differs from the paper: share and mean are over the sealed pairs. The newest pairs, not sealed yet, are read in addition:
    they are the local window, which `n_recent` widens. Query heads of a group read the pairs with the largest summed shares.
    """

    budget: float = 128
    channels: Count = 32
    mean_value: bool = True

    def selector_at(self, layer: int) -> SparQSelector:
        return SparQSelector(self.limits, self.channels, self.mean_value)


@dataclass(frozen=True)
class Shared(Chosen):
    """Chosen pairs of a segment, with their share of the attention."""

    share: Tensor
    """Estimated share of the attention to all sealed pairs, `[Q * N, G]`."""


class SparQSelector(Selector):
    """Selects pairs by a few channels of their keys; see `SparQPress`."""

    def __init__(self, budget: Budget, channels: int, mean_value: bool) -> None:
        self.budget, self.channels, self.mean_value = budget, channels, mean_value
        self.score_bytes += 4 * channels
        self.adds = mean_value

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        return pairs * dim * dtype.itemsize + 4 * (dim + 1)

    def prepare(self, store: KVStore) -> None:
        for segment in store.segments:
            self._index(segment)

    @torch.no_grad()
    def _index(self, segment: Segment) -> None:
        """Store keys channel by channel, and the attention of a zero query: the mean of the values, log of their number.

        Keys of all streams are flat, `[D, n]` of each stream of n pairs.
        """
        if "sparq" in segment.index:
            return
        layout, empty = segment.layout, segment.read(slice(0, 0))[0]
        keys = empty.new_empty(layout.total * empty.shape[1])
        stored = [stream for group in _stream_groups(keys, layout) for stream in group.keys]
        for block in segment.blocks():
            start = block.rows.start - layout.offsets[block.streams.start]
            for n, stream in enumerate(block.keys, start=block.streams.start):
                stored[n][:, start : start + len(stream)] = stream.mT
        segment.index["sparq"] = keys, segment.attend(empty.new_zeros(layout.streams, 1, empty.shape[1]), Logits(1.0))

    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        segments, size = call.store.segments, queries.float().abs()
        channels = size.sum(1).topk(min(self.channels, queries.shape[2])).indices
        index = channels[:, None].expand(-1, queries.shape[1], -1)
        factor = size.sum(2, keepdim=True) / size.gather(2, index).sum(2, keepdim=True).clamp_min(LIMITS.tiny)
        few = queries.gather(2, index) * factor.sqrt()
        logits = [self._logits(call, segment, few, channels) for segment in segments]
        total = torch.cat(logits, dim=2).logsumexp(2, keepdim=True).clamp_min(LIMITS.min)
        best = self.budget.best(
            [(scores - total).logsumexp(1) for scores in logits], [segment.layout for segment in segments]
        )
        if best is None:
            return None
        chosen: list[Chosen] = []
        for segment, pairs, estimate in zip(segments, best, logits, strict=True):
            real = pairs.is_filled
            ranks = (pairs.rows - spans_of(segment.layout, pairs.rows)[0][:, None]) * real
            shares = (estimate.gather(2, ranks[:, None].expand(-1, estimate.shape[1], -1)) - total).exp()
            chosen.append(Shared(pairs.rows, pairs.counts, (shares * real[:, None]).sum(2)))
        return [chosen]

    def _logits(self, call: LayerCall, segment: Segment, few: Tensor, channels: Tensor) -> Tensor:
        """Return estimated logits `[q * N, G, longest]`, -inf past the end of a stream.

        Args:
            call: the layer's call.
            segment: sealed pairs.
            few: chosen channels of the queries, `[q * N, G, r]`, scaled.
            channels: their indexes, `[q * N, r]`.
        """
        self._index(segment)
        (keys, _), layout = segment.index["sparq"], segment.layout
        queries = few.unflatten(0, (-1, layout.streams)), channels.unflatten(0, (-1, layout.streams))
        weight = torch.zeros(layout.total, device=few.device) if segment.log_weight is None else segment.log_weight
        weight = for_tokens(layout.pad(weight, -torch.inf), len(queries[0]))[:, None]
        groups = [
            group.logits(call, *(tensor[:, group.streams].flatten(0, 1) for tensor in queries))
            for group in _stream_groups(keys, layout)
        ]
        if len(groups) == 1:
            return groups[0].add_(weight)
        logits = torch.full((*few.shape[:2], layout.longest), -torch.inf, device=few.device)
        for n, group in enumerate(groups):
            logits[n :: layout.streams, :, : group.shape[2]] = group
        return logits.add_(weight)

    def attend_to(self, call: LayerCall, queries: Tensor, selection: Selection) -> list[Partial]:
        parts = super().attend_to(call, queries, selection)
        if selection is None or not self.mean_value:
            return parts
        share = torch.stack([pairs.share for pairs in selection[0] if isinstance(pairs, Shared)]).sum(0)
        unread = ((1 - share).clamp_min(0) / share.clamp_min(LIMITS.tiny)).log()
        mean, _ = merge([segment.index["sparq"][1] for segment in call.store.segments])
        mean = for_tokens(mean, len(queries) // len(mean)).expand(-1, queries.shape[1], -1)
        return [*parts, (mean, merge(parts)[1] + unread)]


@dataclass(frozen=True)
class _StreamGroup:
    """Keys of equally long streams, channel by channel."""

    streams: slice
    """Indexes of the streams."""
    keys: Tensor
    """Keys `[S, D, n]`."""

    def logits(self, call: LayerCall, few: Tensor, channels: Tensor) -> Tensor:
        """Return the logits `[q * S, G, n]` of `few [q * S, G, r]`, the `channels [q * S, r]` of queries."""
        count, dim, length = self.keys.shape
        rows = torch.arange(len(few), device=few.device)[:, None] % count * dim + channels
        step, keys = max(1, BLOCK // (rows.shape[1] * max(1, length))), self.keys.flatten(0, 1)
        return torch.cat([
            call.logits(queries, keys.index_select(0, block.flatten()).unflatten(0, block.shape).mT)
            for queries, block in zip(few.split(step), rows.split(step), strict=True)
        ])  # fmt: skip


def _stream_groups(keys: Tensor, layout: Layout) -> list[_StreamGroup]:
    """Return one group of all streams if they are equally long, else one group for each stream."""
    dim = len(keys) // max(1, layout.total)
    if layout.uniform:
        return [_StreamGroup(slice(0, layout.streams), keys.view(layout.streams, dim, layout.longest))]
    bounds = itertools.pairwise(layout.offsets)
    return [
        _StreamGroup(slice(n, n + 1), keys[dim * a : dim * b].view(1, dim, b - a)) for n, (a, b) in enumerate(bounds)
    ]
