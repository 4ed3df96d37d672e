# SPDX-License-Identifier: Apache-2.0
"""SparQ: the channels in which a query is large tell which pairs are worth reading."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.cache.attention import Logits, Partial, merge
from kvpress.cache.chosen import Chosen, Selection, for_tokens
from kvpress.cache.layout import Layout
from kvpress.cache.segment import Segment
from kvpress.cache.store import KVStore
from kvpress.core.checks import Count
from kvpress.core.registry import register
from kvpress.core.selector import Budget, Selector, spans_of
from kvpress.observe.call import LayerCall
from kvpress.sparse.base import SelectorPress

LIMITS = torch.finfo(torch.float32)
BLOCK = 2**22
"""Elements of keys that are copied at a time; larger blocks are slow to get from a system."""


@register("sparq", "select", "Ribar et al., 2023, arXiv:2312.04985", example="sparq:budget=256")
@dataclass
class SparQPress(SelectorPress):
    """Read the `budget` pairs with the largest attention weights, as the `channels` largest channels of a query show them.

        share = softmax(scale * sqrt(|q|_1 / |q_r|_1) * q_r . k_r)      o = alpha * o_read + (1 - alpha) * mean(values)

    q_r are the r = `channels` channels, at most all, with the largest sum of |q| over the query heads of a group; alpha is the
    share of what is read, 1 without `mean_value`. Keys are stored twice, the second time channel by channel and unquantised: a
    step reads r channels of all keys.

    Paper: Ribar et al., SparQ Attention: Bandwidth-Efficient LLM Inference, 2023, arXiv:2312.04985.
    Differs from the paper: shares and mean are those of the sealed pairs. The newest pairs, not sealed yet, are read besides:
    they are the local window, which `n_recent` widens. Query heads of a group read the pairs with the largest summed shares.
    """

    budget: float = 128
    channels: Count = 32
    mean_value: bool = True

    def selector_at(self, layer: int) -> SparQSelector:
        return SparQSelector(self.limits, self.channels, self.mean_value)


@dataclass(frozen=True)
class Shared(Chosen):
    """What is read of a segment, and its estimated `share [Q * N, G]` of the attention to all sealed pairs."""

    share: Tensor


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
        """Keep keys channel by channel, and what a query of zeros attends to: the mean of the values, log of their number.

        Keys of all streams lie flat, `[D, n]` of each stream of n pairs.
        """
        if "sparq" in segment.index:
            return
        layout, none = segment.layout, segment.read(slice(0, 0))[0]
        keys = none.new_empty(layout.total * none.shape[1])
        stored = [own for part in _parts(keys, layout) for own in part.keys]
        for block in segment.blocks():
            at = block.rows.start - layout.offsets[block.streams.start]
            for n, own in enumerate(block.keys, start=block.streams.start):
                stored[n][:, at : at + len(own)] = own.mT
        segment.index["sparq"] = keys, segment.attend(none.new_zeros(layout.streams, 1, none.shape[1]), Logits(1.0))

    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        segments, size = call.store.segments, queries.float().abs()
        channels = size.sum(1).topk(min(self.channels, queries.shape[2])).indices
        index = channels[:, None].expand(-1, queries.shape[1], -1)
        factor = size.sum(2, keepdim=True) / size.gather(2, index).sum(2, keepdim=True).clamp_min(LIMITS.tiny)
        few = queries.gather(2, index) * factor.sqrt()
        logits = [self._logits(call, segment, few, channels) for segment in segments]
        total = torch.cat(logits, dim=2).logsumexp(2, keepdim=True).clamp_min(LIMITS.min)
        best = self.budget.best([(part - total).logsumexp(1) for part in logits], [part.layout for part in segments])
        if best is None:
            return None
        chosen: list[Chosen] = []
        for segment, part, found in zip(segments, best, logits, strict=True):
            real = torch.arange(part.rows.shape[1], device=part.rows.device) < part.counts[:, None]
            ranks = (part.rows - spans_of(segment.layout, part.rows)[0][:, None]) * real
            shares = (found.gather(2, ranks[:, None].expand(-1, found.shape[1], -1)) - total).exp()
            chosen.append(Shared(part.rows, part.counts, (shares * real[:, None]).sum(2)))
        return [chosen]

    def _logits(self, call: LayerCall, segment: Segment, few: Tensor, channels: Tensor) -> Tensor:
        """Estimated logits `[q * N, G, longest]`, -inf past the end of a stream."""
        self._index(segment)
        (keys, _), layout = segment.index["sparq"], segment.layout
        asked = few.unflatten(0, (-1, layout.streams)), channels.unflatten(0, (-1, layout.streams))
        weight = torch.zeros(layout.total, device=few.device) if segment.log_weight is None else segment.log_weight
        weight = for_tokens(layout.pad(weight, -torch.inf), len(asked[0]))[:, None]
        parts = [
            part.logits(call, *(of[:, part.streams].flatten(0, 1) for of in asked)) for part in _parts(keys, layout)
        ]
        if len(parts) == 1:
            return parts[0].add_(weight)
        found = torch.full((*few.shape[:2], layout.longest), -torch.inf, device=few.device)
        for n, part in enumerate(parts):
            found[n :: layout.streams, :, : part.shape[2]] = part
        return found.add_(weight)

    def attend_to(self, call: LayerCall, queries: Tensor, selection: Selection) -> list[Partial]:
        parts = super().attend_to(call, queries, selection)
        if selection is None or not self.mean_value:
            return parts
        share = torch.stack([part.share for part in selection[0] if isinstance(part, Shared)]).sum(0)
        rest = ((1 - share).clamp_min(0) / share.clamp_min(LIMITS.tiny)).log()
        mean, _ = merge([segment.index["sparq"][1] for segment in call.store.segments])
        mean = for_tokens(mean, len(queries) // len(mean)).expand(-1, queries.shape[1], -1)
        return [*parts, (mean, merge(parts)[1] + rest)]


@dataclass(frozen=True)
class _Part:
    """Keys `[S, D, n]` of some streams, channel by channel."""

    streams: slice
    keys: Tensor

    def logits(self, call: LayerCall, few: Tensor, channels: Tensor) -> Tensor:
        """Logits `[q * S, G, n]` of `few [q * S, G, r]`, the chosen `channels [q * S, r]` of queries."""
        count, dim, length = self.keys.shape
        rows = torch.arange(len(few), device=few.device)[:, None] % count * dim + channels
        step, keys = max(1, BLOCK // (rows.shape[1] * max(1, length))), self.keys.flatten(0, 1)
        return torch.cat([
            call.logits(asked, keys.index_select(0, part.flatten()).unflatten(0, part.shape).mT)
            for asked, part in zip(few.split(step), rows.split(step), strict=True)
        ])  # fmt: skip


def _parts(keys: Tensor, layout: Layout) -> list[_Part]:
    """Return all streams at once where they are equally long, else one by one."""
    dim = len(keys) // max(1, layout.total)
    if layout.uniform:
        return [_Part(slice(0, layout.streams), keys.view(layout.streams, dim, layout.longest))]
    bounds = itertools.pairwise(layout.offsets)
    return [_Part(slice(n, n + 1), keys[dim * a : dim * b].view(1, dim, b - a)) for n, (a, b) in enumerate(bounds)]
