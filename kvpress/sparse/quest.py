# SPDX-License-Identifier: Apache-2.0
"""Quest: read only the pages that may hold large logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvpress.cache import attention
from kvpress.cache.codec import DenseCodec
from kvpress.cache.files import keep_whole
from kvpress.cache.layout import Layout
from kvpress.cache.segment import Segment, read_keys
from kvpress.cache.selection import Chosen
from kvpress.core.checks import Count, Size
from kvpress.core.registry import register
from kvpress.core.selector import Budget, spans_of
from kvpress.kernels import Pages, Ranges, page_bounds, page_rows
from kvpress.observe.call import LayerCall
from kvpress.sparse.base import SelectorPress
from kvpress.sparse.blocks import BlockSelector, merged_order, pair_ranges, pairs_of


@register("quest", "select", "Tang et al., 2024, arXiv:2406.10774", example="quest:budget=1024", status="recommended")
@dataclass
class QuestPress(SelectorPress):
    """Keep every pair, but read about `budget` of them for every token: the best pages of `page_size` pairs; 4 beats 16.

    `budget` is a number of pairs, or a fraction in (0, 1) of the stored ones.

    Each page stores the channel-wise minimum and maximum of its keys, which bound every logit in it:

        bound[page] = sum over d of max(q[d] * min[d], q[d] * max[d])

    A KV head reads the pages with the largest bound over its query heads. The pages of the oldest `n_sink` and newest
    `n_recent` sealed pairs are always read. The newest pairs, which are not in pages yet, are read in addition: up to 5 pages
    after a prompt; generated ones enter pages 64 at a time (256 on a GPU). The first `skip_layers` layers read everything.

    Small pages find more: reading 128 of 1024 pairs, SmolLM2-135M-Instruct answers 13% of the questions with `page_size=16`,
    as in the paper, and 62% with 4 (full cache 80%, `docs/real-models.md`). The bounds of pages of 4 take half of the memory of
    keys, those of pages of 16 an eighth.

    Paper: Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, 2024, arXiv:2406.10774.
    Differs from the paper: query heads of a group share pages, because they share keys; pages count stored pairs, so that
    caches after an eviction or with a codec work too.
    """

    page_size: Count = 16
    skip_layers: Size = 2

    def validate(self) -> None:
        super().validate()
        if isinstance(self.budget, int) and self.budget < self.page_size:
            raise ValueError(
                f"budget must be >= {self.page_size}, got {self.budget}: a page has page_size={self.page_size} pairs; raise "
                "budget, or lower page_size"
            )

    def selector_at(self, layer: int) -> QuestSelector | None:
        return QuestSelector(self.limits, self.page_size) if layer >= self.skip_layers else None


@keep_whole
@dataclass
class PageIndex:
    """Bounds of the keys of each page.

    Pages count the pairs of a stream across its segments. So the choice depends neither on when pairs were sealed nor on other
    rows of the batch.
    """

    low: Tensor
    """Minimum of each channel, `[pages, D]`."""
    high: Tensor
    """Maximum of each channel, `[pages, D]`."""
    layout: Layout
    """Pages of each stream."""
    pairs: Layout
    """Indexed pairs of each stream."""

    @classmethod
    def build(cls, segments: Sequence[Segment], size: int, previous: PageIndex | None = None) -> PageIndex:
        """Return the index of all pairs of the segments; the full pages of the `previous` index are copied."""
        pairs = pairs_of(segments)
        layout = Layout(-(-length // size) for length in pairs.lengths)
        kept = (
            torch.zeros(pairs.streams, dtype=torch.int64) if previous is None else previous.pairs.lengths_tensor // size
        )
        added = Layout((layout.lengths_tensor - kept).tolist())
        low, high = _bounds(segments, pairs, kept * size, added, size)
        if previous is not None:
            order = merged_order(previous.layout, kept, added).to(low.device)
            low, high = torch.cat([previous.low, low])[order], torch.cat([previous.high, high])[order]
        return cls(low, high, layout, pairs)

    def tensors(self) -> list[Tensor]:
        """Return the stored tensors, for the memory report."""
        return [self.low, self.high]

    def written(self) -> dict[str, Any]:
        """Return the state for a file."""
        return {name: value for name, value in vars(self).items() if name != "readings"}

    @cached_property
    def readings(self) -> dict[tuple[int, bool, Budget], PageReading]:
        """Arguments of `page_rows` by number of query streams, whether segments are joined, and budget; read at every token."""
        return {}


@dataclass
class PageReading:
    """Arguments of `page_rows` for an index."""

    pages: Pages
    """Bounds of pages, and the pages and pairs of each query stream."""
    arguments: dict[str, Any]
    """Number of pages to choose of each stream."""
    is_whole: bool
    """Whether all pages of all streams are read."""
    splits_recent: bool
    """Whether the newest pages are too few for the recent pairs of a stream."""


def _bounds(
    segments: Sequence[Segment], pairs: Layout, first: Tensor, pages: Layout, size: int
) -> tuple[Tensor, Tensor]:
    """Return channel-wise minima and maxima, each `[pages, D]`, of the keys of every stream from rank `first [N]` on."""
    device, empty = segments[0].device, segments[0].read(slice(0, 0))[0]
    low, high = (empty.new_empty(pages.total, empty.shape[1]) for _ in range(2))
    step = max(1, attention.BLOCK_BYTES // (8 * pairs.streams * size * max(1, empty.shape[1])))
    for start in range(0, pages.longest, step):
        streams = (pages.lengths_tensor > start).nonzero().flatten()
        numbers = start + torch.arange(min(step, pages.longest - start))
        ranks = first[streams, None] + (numbers[:, None] * size + torch.arange(size)).flatten()
        # The last page is filled up with its last key, which changes neither bound.
        keys = read_keys(segments, streams, ranks.minimum(pairs.lengths_tensor[streams, None] - 1))
        keys = keys.unflatten(1, (-1, size))
        exists = (numbers < pages.lengths_tensor[streams, None]).to(device)
        rows = (pages.starts_tensor[streams, None] + numbers).to(device)[exists]
        low[rows], high[rows] = keys.amin(dim=2)[exists], keys.amax(dim=2)[exists]
    return low, high


class QuestSelector(BlockSelector):
    """Selects pages by the bounds of their logits; see `QuestPress`."""

    def __init__(self, budget: Budget, page_size: int) -> None:
        self.budget, self.unit = budget, page_size
        self.sealing = DenseCodec(group=4 * page_size, residual=page_size)

    @property
    def name(self) -> str:
        return f"pages{self.unit}"

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        return -(-pairs // self.unit) * 2 * dim * dtype.itemsize

    def build(self, segments: Sequence[Segment], previous: PageIndex | None) -> PageIndex:
        return PageIndex.build(segments, self.unit, previous)

    def worth(self, call: LayerCall, queries: Tensor, index: PageIndex) -> tuple[Tensor, Layout]:
        del call
        pages = Ranges(*spans_of(index.layout, queries))
        return page_bounds(queries, index.low, index.high, pages, capacity=index.layout.longest), index.layout

    def best(self, call: LayerCall, queries: Tensor, index: PageIndex, joined: bool) -> Chosen | None:
        key = len(queries), joined, self.budget
        reading = index.readings.get(key)
        if reading is None:
            reading = index.readings[key] = self._reading(queries, index, joined)
        if reading.splits_recent:
            return super().best(call, queries, index, joined)
        return None if reading.is_whole else Chosen(*page_rows(queries, reading.pages, **reading.arguments))

    def _reading(self, queries: Tensor, index: PageIndex, joined: bool) -> PageReading:
        """Return how `queries [q * N, G, D]` read an index; `joined` as in `BlockSelector.best`."""
        layouts, pages = [index.layout], Ranges(*spans_of(index.layout, queries))
        longest = index.pairs.longest, index.layout.longest
        pairs = pair_ranges(index, queries, joined)
        return PageReading(
            Pages(index.low, index.high, pages, pairs, self.unit, *longest),
            self.budget.arguments(pages.lengths, layouts, self.unit),
            self.budget.reads_all(layouts, self.unit),
            self.splits_recent(index.pairs),
        )
