# SPDX-License-Identifier: Apache-2.0
"""Quest: read only the pages that may hold large logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.cache import attention
from kvpress.cache.codec import DenseCodec
from kvpress.cache.files import keep_whole
from kvpress.cache.layout import Layout
from kvpress.cache.segment import Segment, read_keys
from kvpress.core.checks import Count, Size, check_count
from kvpress.core.registry import register
from kvpress.core.selector import Budget, spans_of
from kvpress.kernels import Ranges, page_bounds
from kvpress.observe.call import LayerCall
from kvpress.sparse.base import SelectorPress
from kvpress.sparse.blocks import BlockSelector, behind, pairs_of


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


@keep_whole
@dataclass
class PageIndex:
    """Bounds of the keys of each page: `low` and `high [pages, D]`, laid out per stream as `layout`.

    A page holds the next `size` pairs of a stream in the order of its `pairs`, whatever segments they lie in: what is chosen
    does not depend on when and with whom they were sealed.
    """

    low: Tensor
    high: Tensor
    layout: Layout
    pairs: Layout

    @classmethod
    def build(cls, segments: Sequence[Segment], size: int, known: PageIndex | None = None) -> PageIndex:
        """Index all pairs of some segments, of which the full pages of the first ones may be `known`."""
        pairs = pairs_of(segments)
        layout = Layout(-(-length // size) for length in pairs.lengths)
        kept = torch.zeros(pairs.streams, dtype=torch.int64) if known is None else known.pairs.lengths_tensor // size
        fresh = Layout((layout.lengths_tensor - kept).tolist())
        low, high = _bounds(segments, pairs, kept * size, fresh, size)
        if known is not None:
            order = behind(known.layout, kept, fresh).to(low.device)
            low, high = torch.cat([known.low, low])[order], torch.cat([known.high, high])[order]
        return cls(low, high, layout, pairs)

    def bounds(self, queries: Tensor) -> Tensor:
        """Upper bounds of the logits in each page, `[q * N, most pages]`, maximum over the G query rows of `[q * N, G, D]`.

        They are -inf past the end of a stream.
        """
        where = Ranges(*spans_of(self.layout, queries))
        return page_bounds(queries, self.low, self.high, where, capacity=self.layout.longest)

    def tensors(self) -> list[Tensor]:
        """Tensors held, for the memory report."""
        return [self.low, self.high]


def _bounds(
    segments: Sequence[Segment], pairs: Layout, first: Tensor, pages: Layout, size: int
) -> tuple[Tensor, Tensor]:
    """Channel-wise minima and maxima, each `[pages, D]`, of the keys from rank `first [N]` of every stream on."""
    device, none = segments[0].device, segments[0].read(slice(0, 0))[0]
    low, high = (none.new_empty(pages.total, none.shape[1]) for _ in range(2))
    step = max(1, attention.BLOCK_BYTES // (8 * pairs.streams * size * max(1, none.shape[1])))
    for start in range(0, pages.longest, step):
        live = (pages.lengths_tensor > start).nonzero().flatten()
        places = start + torch.arange(min(step, pages.longest - start))
        ranks = first[live, None] + (places[:, None] * size + torch.arange(size)).flatten()
        # The last page is filled up with its own last key, which changes neither bound.
        keys = read_keys(segments, live, ranks.minimum(pairs.lengths_tensor[live, None] - 1))
        keys = keys.unflatten(1, (-1, size))
        exists = (places < pages.lengths_tensor[live, None]).to(device)
        at = (pages.starts_tensor[live, None] + places).to(device)[exists]
        low[at], high[at] = keys.amin(dim=2)[exists], keys.amax(dim=2)[exists]
    return low, high


class QuestSelector(BlockSelector):
    """Selects pages; see `QuestPress`."""

    def __init__(self, budget: Budget, page_size: int) -> None:
        self.budget, self.unit = budget, page_size
        self.sealing = DenseCodec(group=4 * page_size, residual=page_size)

    @property
    def name(self) -> str:
        return f"pages{self.unit}"

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        return -(-pairs // self.unit) * 2 * dim * dtype.itemsize

    def build(self, segments: Sequence[Segment], known: PageIndex | None) -> PageIndex:
        return PageIndex.build(segments, self.unit, known)

    def worth(self, call: LayerCall, queries: Tensor, index: PageIndex) -> tuple[Tensor, Layout]:
        return index.bounds(queries), index.layout
