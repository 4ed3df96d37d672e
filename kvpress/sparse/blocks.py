# SPDX-License-Identifier: Apache-2.0
"""Blocks of consecutive pairs of a stream, whatever segments they lie in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpress.cache.chosen import Chosen, Selection
from kvpress.cache.layout import Layout, spans
from kvpress.cache.segment import Segment
from kvpress.cache.store import KVStore
from kvpress.core.selector import Budget, Selector, spans_of, split_ranks
from kvpress.observe.call import LayerCall


class BlockIndex(Protocol):
    """What is known of all `pairs` of a layer, block by block."""

    pairs: Layout

    def tensors(self) -> list[Tensor]:
        """Tensors held, for the memory report."""


class BlockSelector(Selector):
    """Reads whole blocks of `unit` pairs: subclasses say what is known of them, and what they are worth."""

    budget: Budget

    @property
    @abstractmethod
    def name(self) -> str:
        """The name under which a layer holds the index."""

    @abstractmethod
    def build(self, segments: Sequence[Segment], known: Any) -> BlockIndex:
        """Index all pairs of some segments, of which the first ones may be `known`."""

    @abstractmethod
    def worth(self, call: LayerCall, queries: Tensor, index: Any) -> tuple[Tensor, Layout]:
        """Return scores `[q * N, most blocks]` for `queries [q * N, G, D]`, -inf past the end of a stream, and the blocks."""

    def prepare(self, store: KVStore) -> None:
        if store.segments:
            self._index(store)

    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        del first
        index = self._index(call.store)
        scores, blocks = self.worth(call, queries, index)
        best = self.budget.best([scores], [blocks], self.unit)
        if best is None:
            return None
        ranks = ranks_in(best[0], blocks, index.pairs, self.unit)
        return [split_ranks(*ranks, [segment.layout for segment in call.store.segments])]

    def _index(self, store: KVStore) -> BlockIndex:
        index: BlockIndex | None = store.index.get(self.name)
        if index is None or index.pairs.total != sum(segment.layout.total for segment in store.segments):
            index = store.index[self.name] = self.build(store.segments, index)
        return index


def pairs_of(segments: Sequence[Segment]) -> Layout:
    """Return how many pairs each stream holds in some segments."""
    return Layout(map(sum, zip(*(segment.layout.lengths for segment in segments), strict=True)))


def behind(known: Layout, kept: Tensor, fresh: Layout) -> Tensor:
    """Return, of `known` entries with `fresh` ones behind them, those of each stream: its first `kept [N]`, then its fresh."""
    starts = torch.stack([known.starts_tensor, fresh.starts_tensor + known.total], dim=1)
    return spans(starts.flatten(), torch.stack([kept, fresh.lengths_tensor], dim=1).flatten())


def ranks_in(chosen: Chosen, blocks: Layout, pairs: Layout, size: int) -> tuple[Tensor, Tensor]:
    """Return the ranks `[q * N, K]` of the pairs in chosen blocks of `size` of them, and how many these are.

    Only the last block of a stream may be short, so no gaps arise.
    """
    first, _ = spans_of(blocks, chosen.rows)
    _, lengths = spans_of(pairs, chosen.rows)
    ranks = (chosen.rows - first[:, None])[..., None] * size
    ranks = ranks + torch.arange(size, device=ranks.device)
    real = torch.arange(chosen.rows.shape[1], device=ranks.device) < chosen.counts[:, None]
    exists = real[..., None] & (ranks < lengths[:, None, None])
    return ranks.flatten(1)[:, : pairs.longest], exists.flatten(1).sum(dim=1)
