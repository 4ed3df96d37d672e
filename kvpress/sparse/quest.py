"""Quest: read only the pages that may hold large logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.cache.chosen import Chosen, Selection
from kvpress.cache.codec import DenseCodec
from kvpress.cache.layout import Layout
from kvpress.cache.segment import Segment
from kvpress.core.checks import Count, Size, check_count
from kvpress.core.registry import register
from kvpress.core.selector import Budget, Selector, spans_of
from kvpress.kernels import Ranges, page_bounds
from kvpress.observe.call import LayerCall
from kvpress.sparse.base import SelectorPress


@register("quest", "select", "Tang et al., 2024, arXiv:2406.10774", example="quest:budget=1024")
@dataclass
class QuestPress(SelectorPress):
    """Keep every pair, but read only about `budget` of them for every token: the best pages of `page_size` pairs.

    `budget` is a number of pairs, or a fraction in (0, 1) of those held.

    Each page stores the channel-wise minimum and maximum of its keys, which bound every logit in it:

        bound[page] = sum over d of max(q[d] * min[d], q[d] * max[d])

    Pages are chosen per kv head by the largest bound over its query heads; those of the oldest `n_sink` and newest `n_recent`
    sealed pairs always are. The newest pairs, up to 5 pages that are not sealed yet, are read besides. The first
    `skip_layers` layers read everything.

    Paper: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, 2024, arXiv:2406.10774.
    Differs from the paper: query heads of a group share pages, because they share keys; pages count stored pairs, so it
    works on evicted and on encoded caches.
    """

    page_size: Count = 16
    skip_layers: Size = 2

    def validate(self) -> None:
        super().validate()
        if isinstance(self.budget, int):
            check_count("budget", self.budget, least=self.page_size)

    def selector_at(self, layer: int) -> QuestSelector | None:
        return QuestSelector(self.limits, self.page_size) if layer >= self.skip_layers else None


@dataclass
class PageIndex:
    """Bounds of the keys of each page: `low` and `high [pages, D]`, laid out per stream as `layout`."""

    low: Tensor
    high: Tensor
    layout: Layout

    @classmethod
    def build(cls, segment: Segment, size: int) -> PageIndex:
        """Index all pairs of a segment."""
        low, high = [], []
        for block in segment.blocks():
            keys = block.keys
            short = -keys.shape[1] % size
            # The last page is filled up with its own last key, which changes neither bound.
            keys = torch.cat([keys, keys[:, -1:].expand(-1, short, -1)], dim=1) if short else keys
            pages = keys.unflatten(1, (-1, size))
            low.append(pages.amin(dim=2).flatten(0, 1))
            high.append(pages.amax(dim=2).flatten(0, 1))
        return cls(torch.cat(low), torch.cat(high), Layout(-(-length // size) for length in segment.layout.lengths))

    def bounds(self, queries: Tensor) -> Tensor:
        """Upper bounds of the logits in each page, `[q * N, most pages]`, maximum over the G query rows of `[q * N, G, D]`.

        They are -inf past the end of a stream.
        """
        where = Ranges(*spans_of(self.layout, queries))
        return page_bounds(queries, self.low, self.high, where, capacity=self.layout.longest)

    def tensors(self) -> list[Tensor]:
        """Tensors held, for the memory report."""
        return [self.low, self.high]


class QuestSelector(Selector):
    """Selects pages; see `QuestPress`."""

    def __init__(self, budget: Budget, page_size: int) -> None:
        self.budget = budget
        self.unit = self.page_size = page_size
        self.sealing = DenseCodec(group=4 * page_size, residual=page_size)

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        return -(-pairs // self.page_size) * 2 * dim * dtype.itemsize

    def prepare(self, segment: Segment) -> None:
        self._index(segment)

    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        del first
        segments = call.store.segments
        indexes = [self._index(segment) for segment in segments]
        bounds = [index.bounds(queries) for index in indexes]
        pages = self.budget.best(bounds, [index.layout for index in indexes], self.page_size)
        if pages is None:
            return None
        return [[self._rows(*found) for found in zip(segments, pages, indexes, strict=True)]]

    def _rows(self, segment: Segment, pages: Chosen, index: PageIndex) -> Chosen:
        """The pairs of the chosen pages; only the last page of a stream may be short, so no gaps arise."""
        first, _ = spans_of(index.layout, pages.rows)
        starts, lengths = spans_of(segment.layout, pages.rows)
        ranks = (pages.rows - first[:, None])[..., None] * self.page_size
        ranks = ranks + torch.arange(self.page_size, device=ranks.device)
        real = torch.arange(pages.rows.shape[1], device=ranks.device) < pages.counts[:, None]
        exists = (real[..., None] & (ranks < lengths[:, None, None])).flatten(1)
        rows = (starts[:, None] + ranks.flatten(1)).masked_fill(~exists, 0)
        return Chosen(rows[:, : segment.layout.longest], exists.sum(dim=1))

    def _index(self, segment: Segment) -> PageIndex:
        key = f"pages{self.page_size}"
        if key not in segment.index:
            segment.index[key] = PageIndex.build(segment, self.page_size)
        index: PageIndex = segment.index[key]
        return index
