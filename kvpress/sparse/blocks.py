# SPDX-License-Identifier: Apache-2.0
"""Selection of blocks: consecutive pairs of a stream, which may lie in several segments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpress.cache.layout import Layout, spans
from kvpress.cache.segment import Segment
from kvpress.cache.selection import Chosen, Selection
from kvpress.cache.store import KVStore
from kvpress.core.selector import Budget, Selector, spans_of, split_ranks
from kvpress.kernels import Listed, Ranges, rows_of_blocks, top_rows
from kvpress.observe.call import LayerCall


class BlockIndex(Protocol):
    """Summary of every block of a layer's sealed pairs, such as bounds or means of their keys."""

    pairs: Layout
    """Sealed pairs of each stream that the index covers."""

    def tensors(self) -> list[Tensor]:
        """Return the stored tensors, for the memory report."""


class BlockSelector(Selector):
    """Base of selectors that read blocks of `unit` pairs.

    A subclass defines the index of the blocks (`name`, `build`) and the score of each block for a query (`worth`), or `best`
    where one operator scores blocks and lists the pairs of the best ones.
    """

    budget: Budget

    @property
    @abstractmethod
    def name(self) -> str:
        """Name under which a layer stores the index."""

    @abstractmethod
    def build(self, segments: Sequence[Segment], previous: Any) -> BlockIndex:
        """Return the index of all pairs of the segments; `previous` is the index from before pairs were added, or None."""

    def worth(self, call: LayerCall, queries: Tensor, index: Any) -> tuple[Tensor, Layout]:
        """Return scores `[q * N, most blocks]` of `queries [q * N, G, D]`, -inf past a stream's end, and the blocks' layout."""
        raise NotImplementedError

    def best(self, call: LayerCall, queries: Tensor, index: Any, joined: bool) -> Chosen | None:
        """Return the pairs of the best blocks for each query stream; None if all are read.

        Pairs are named by their row in the only segment, or, if they are `joined` from several, by their rank in the stream.
        """
        scores, blocks = self.worth(call, queries, index)
        if self.budget.reads_all([blocks], self.unit):
            return None
        block_ranges = Ranges(*spans_of(blocks, queries))
        pairs = pair_ranges(index, queries, joined)
        arguments = self.budget.arguments(block_ranges.lengths, [blocks], self.unit)
        if self.splits_recent(index.pairs):
            scores, arguments = self._with_recent(scores, block_ranges.lengths, pairs.lengths, arguments)
        chosen = Listed(*top_rows(scores, block_ranges, **arguments))
        return Chosen(*rows_of_blocks(chosen, block_ranges, pairs, self.unit, longest=index.pairs.longest))

    def splits_recent(self, pairs: Layout) -> bool:
        """Whether the newest blocks are too few for the recent pairs of a stream, because its last block is not full."""
        last, count = self.budget.last, self.budget.forced(self.unit)[1]
        return bool(last) and any(
            max(0, length - last) // self.unit < -(-length // self.unit) - count for length in pairs.lengths
        )

    def _with_recent(
        self, scores: Tensor, num_blocks: Tensor, num_pairs: Tensor, arguments: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return scores and arguments of `top_rows` with which the block of the oldest recent pair is always read too.

        Args:
            scores: scores of blocks, `[q * N, most blocks]`.
            num_blocks: blocks of each query stream, int64 `[q * N]`.
            num_pairs: pairs of each query stream, int64 `[q * N]`.
            arguments: arguments of `top_rows`, which always reads the newest blocks.
        """
        number = torch.arange(scores.shape[1], device=scores.device)
        begin, end = (num_pairs - self.budget.last).clamp_min(0) // self.unit, num_blocks - arguments["last"]
        is_recent = (number >= begin[:, None]) & (number < end[:, None])
        least = arguments["first"] + arguments["last"] + 1
        limits = (
            num_blocks.new_full(num_blocks.shape, arguments["k"])
            if arguments["limits"] is None
            else arguments["limits"]
        )
        limits = torch.where(begin < end, limits.clamp_min(least), limits)
        return scores.masked_fill(is_recent, torch.inf), {
            **arguments,
            "k": max(arguments["k"], least),
            "limits": limits,
        }

    def prepare(self, store: KVStore) -> None:
        if store.segments:
            self._index(store)

    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        del first
        layouts = [segment.layout for segment in call.store.segments]
        joined = len(layouts) > 1
        best = self.best(call, queries, self._index(call.store), joined)
        if best is None:
            return None
        return [split_ranks(best.rows, best.counts, layouts) if joined else [best]]

    def _index(self, store: KVStore) -> BlockIndex:
        index: BlockIndex | None = store.index.get(self.name)
        if index is None or index.pairs.total != sum([segment.layout.total for segment in store.segments]):
            index = store.index[self.name] = self.build(store.segments, index)
        return index


def pair_ranges(index: BlockIndex, queries: Tensor, joined: bool) -> Ranges:
    """Return the indexed pairs of each stream of `queries [q * N, G, D]`: rows of one segment, or ranks over several."""
    starts, lengths = spans_of(index.pairs, queries)
    return Ranges(torch.zeros_like(starts) if joined else starts, lengths)


def pairs_of(segments: Sequence[Segment]) -> Layout:
    """Return the number of pairs of each stream, summed over the segments."""
    return Layout(map(sum, zip(*(segment.layout.lengths for segment in segments), strict=True)))


def merged_order(previous: Layout, kept: Tensor, added: Layout) -> Tensor:
    """Return the order that joins two flat indexes stream by stream.

    The concatenation of `previous` and `added` entries, taken in this order, holds for each stream its first `kept [N]`
    previous entries, then its added ones.
    """
    starts = torch.stack([previous.starts_tensor, added.starts_tensor + previous.total], dim=1)
    return spans(starts.flatten(), torch.stack([kept, added.lengths_tensor], dim=1).flatten())
