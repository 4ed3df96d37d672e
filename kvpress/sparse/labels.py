# SPDX-License-Identifier: Apache-2.0
"""Labels: short copies of keys, whose products with a query choose the pairs that it reads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.cache.files import keep_whole
from kvpress.cache.segment import Segment
from kvpress.cache.selection import Chosen, Selection
from kvpress.cache.store import KVStore
from kvpress.core.selector import Budget, Selector, spans_of
from kvpress.kernels import Dense, Packed, Ranges, label_rows, label_scores, quantise, row_step
from kvpress.observe.call import LayerCall

QUARTER = 4
"""Default number of key channels for each label channel."""


@keep_whole
@dataclass
class Labels:
    """Labels of all pairs of a segment."""

    rows: Dense | Packed
    """Labels `[total, r]`, flat like the pairs, or their codes."""
    made_by: str
    """Name of the selector settings that made them."""

    @classmethod
    def build(
        cls, segment: Segment, shorten: Callable[[Tensor, Tensor], Tensor], bits: int, made_by: str = ""
    ) -> Labels:
        """Make the labels of all keys: `shorten` maps keys `[S, n, D]` of streams `[S]` to labels `[S, n, r]`."""
        streams = torch.arange(segment.layout.streams, device=segment.device)
        labels = torch.cat([shorten(block.keys, streams[block.streams]).flatten(0, 1) for block in segment.blocks()])
        if bits == 16:
            return cls(Dense(labels), made_by)
        return cls(quantise(labels, bits, (1, labels.shape[1])), made_by)

    def tensors(self) -> list[Tensor]:
        """Return the stored tensors, for the memory report."""
        return [tensor for tensor in self.rows.tensors() if tensor is not None]


class LabelSelector(Selector):
    """Base of selectors that read the pairs whose labels have the largest products with the query.

    A subclass defines `shorten`, which makes labels of keys and of queries.

    Args:
        budget: pairs that a token reads.
        channels: numbers in a label; None is a quarter of the head dim.
        bits: bits for each number of a label; 16 stores labels in the model's type.
        reduce: "max" or "sum" of the products with the query heads of a GQA group.
    """

    index: ClassVar[str]
    """Name under which a segment stores its labels."""

    def __init__(self, budget: Budget, channels: int | None, bits: int, reduce: str = "max") -> None:
        self.budget, self.channels, self.bits, self.reduce = budget, channels, bits, reduce
        # Labels that were made under another name are made again.
        self.name = ""

    @abstractmethod
    def shorten(self, store: KVStore, vectors: Tensor, streams: Tensor) -> Tensor:
        """Return the labels `[S, n, r]` of keys or queries `[S, n, D]` of the `streams`, int64 `[S]`."""

    def label_channels(self, dim: int) -> int:
        """Return the number of channels in the label of a key of `dim` channels.

        Raises:
            ValueError: `channels` is larger than `dim`, or codes of this width do not fill bytes.
        """
        step = 1 if self.bits == 16 else row_step(self.bits)
        channels = max(step, dim // QUARTER // step * step) if self.channels is None else self.channels
        if channels > dim or channels % step:
            raise ValueError(
                f"channels must be a multiple of {step} for labels of {self.bits} bits, and at most the model's head dim "
                f"{dim}, got {channels}"
            )
        return channels

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        channels = self.label_channels(dim)
        if self.bits == 16:
            return pairs * channels * dtype.itemsize
        parameter = 4 if dtype == torch.float32 else 2
        return pairs * (channels * self.bits / 8 + 2 * parameter)

    def prepare(self, store: KVStore) -> None:
        for segment in store.segments:
            self._labels(store, segment)

    def choose(self, call: LayerCall, queries: Tensor, first: int = 0) -> Selection:
        del first
        chosen = self.best(call.store, call.store.segments, queries)
        return None if chosen is None else [chosen]

    def best(self, store: KVStore, segments: Sequence[Segment], queries: Tensor) -> list[Chosen] | None:
        """Return the pairs that `queries [q * N, G, D]` read of the `segments` of a layer; None for all pairs."""
        layouts = [segment.layout for segment in segments]
        if self.budget.reads_all(layouts):
            return None
        labels = [self._labels(store, segment).rows for segment in segments]
        streams = torch.arange(len(queries), device=queries.device) % segments[0].layout.streams
        query_labels = self.shorten(store, queries, streams)
        if len(segments) == 1:
            (layout,), ranges = layouts, Ranges(*spans_of(layouts[0], queries))
            rows, counts = label_rows(
                query_labels, labels[0], ranges, reduce=self.reduce, capacity=layout.longest,
                **self.budget.arguments(ranges.lengths, layouts),
            )  # fmt: skip
            return [Chosen(rows, counts)]
        scores = [
            label_scores(
                query_labels, rows, Ranges(*spans_of(layout, queries)), reduce=self.reduce, capacity=layout.longest,
            )
            for layout, rows in zip(layouts, labels, strict=True)
        ]  # fmt: skip
        return self.budget.best(scores, layouts)

    def _labels(self, store: KVStore, segment: Segment) -> Labels:
        labels: Labels | None = segment.index.get(self.index)
        if labels is None or labels.made_by != self.name:

            def shorten(keys: Tensor, streams: Tensor) -> Tensor:
                return self.shorten(store, keys, streams)

            labels = segment.index[self.index] = Labels.build(segment, shorten, self.bits, self.name)
        return labels
