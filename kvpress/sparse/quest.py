"""Quest: read only the pages that may hold large logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.attention import Logits, Partial
from kvpress.cache.layout import Layout
from kvpress.cache.segment import Segment
from kvpress.cache.store import KVStore
from kvpress.checks import check_count
from kvpress.kernels import page_bounds
from kvpress.presses.base import BasePress
from kvpress.quant.base import DenseCodec
from kvpress.registry import register
from kvpress.sparse.base import Selector


@register("quest", "select", "Tang et al., 2024, arXiv:2406.10774")
@dataclass
class QuestPress(BasePress):
    """Keep every pair, but read only about `budget` of them per decode step: the best pages of `page_size` pairs.

    Each page stores the channel-wise minimum and maximum of its keys, which bound every logit in it:

        bound[page] = sum over d of max(q[d] * min[d], q[d] * max[d])

    Pages are chosen per kv head by the largest bound over its query heads. The newest pairs, up to 5 pages that are not sealed
    yet, are read besides. The first `skip_layers` layers read everything.

    Paper: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, 2024, arXiv:2406.10774.
    Differs from the paper: query heads of a group share pages, because they share keys; pages count stored pairs, so it
    works on evicted and on encoded caches.
    """

    budget: int = 1024
    page_size: int = 16
    skip_layers: int = 2

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        check_count("page_size", self.page_size)
        check_count("budget", self.budget, least=self.page_size)
        check_count("skip_layers", self.skip_layers, least=0)

    @property
    def selector(self) -> QuestSelector:
        return QuestSelector(self.budget, self.page_size, self.skip_layers)


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
        """Upper bounds of the logits in each page, `[N, most pages]`, maximum over the query rows; -inf past the end."""
        layout = self.layout
        starts, counts = layout.on(queries.device)
        return page_bounds(self.low, self.high, queries, starts, counts, capacity=layout.longest)

    def tensors(self) -> list[Tensor]:
        """Tensors held, for the memory report."""
        return [self.low, self.high]


class QuestSelector(Selector):
    """Selects pages; see `QuestPress`."""

    def __init__(self, budget: int, page_size: int, skip_layers: int) -> None:
        self.budget, self.page_size, self.skip_layers = budget, page_size, skip_layers
        self.sealing = DenseCodec(group=4 * page_size, residual=page_size)

    def reads(self, layer: int) -> bool:
        return layer >= self.skip_layers

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        return -(-pairs // self.page_size) * 2 * dim * dtype.itemsize

    def prepare(self, segment: Segment) -> None:
        self._index(segment)

    def attend(self, queries: Tensor, logits: Logits, store: KVStore) -> list[Partial]:
        indexes = [self._index(segment) for segment in store.segments]
        pages = self.budget // self.page_size
        if pages >= max(sum(counts) for counts in zip(*(index.layout.lengths for index in indexes), strict=True)):
            return [segment.attend(queries, logits) for segment in store.segments]
        bounds = [index.bounds(queries) for index in indexes]
        chosen = torch.cat(bounds, dim=1).topk(pages, dim=1).indices
        parts = []
        start = 0
        for segment, bound in zip(store.segments, bounds, strict=True):
            here = chosen - start
            start += bound.shape[1]
            rows, counts = self._rows(segment, here, (here >= 0) & (here < bound.shape[1]))
            parts.append(segment.attend_rows(queries, logits, rows, counts))
        return parts

    def _rows(self, segment: Segment, pages: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
        """Flat rows `[N, K]` of the chosen pages that lie in this segment, existing ones first, and their number."""
        ranks = pages[..., None] * self.page_size + torch.arange(self.page_size, device=pages.device)
        starts, lengths = (part[:, None, None] for part in segment.layout.on(pages.device))
        exists = (inside[..., None] & (ranks < lengths)).flatten(1)
        rows = (starts + ranks).flatten(1)
        counts = exists.sum(dim=1)
        # As wide as the choice can be: how wide it is would have to be waited for.
        order = exists.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, : segment.layout.longest]
        return rows.masked_fill(~exists, 0).gather(1, order), counts

    def _index(self, segment: Segment) -> PageIndex:
        key = f"pages{self.page_size}"
        if key not in segment.index:
            segment.index[key] = PageIndex.build(segment, self.page_size)
        index: PageIndex = segment.index[key]
        return index
