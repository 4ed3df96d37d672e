# SPDX-License-Identifier: Apache-2.0
"""Labels: short vectors in the place of keys, by which pairs are chosen."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.cache.chosen import Chosen, Selection
from kvpress.cache.files import keep_whole
from kvpress.cache.segment import Segment
from kvpress.cache.store import KVStore
from kvpress.core.selector import Budget, Selector, spans_of
from kvpress.kernels import Dense, Packed, Ranges, label_rows, label_scores, quantise, row_step
from kvpress.observe.call import LayerCall

QUARTER = 4
"""Channels of a key for each channel of its label, if nobody says otherwise."""


@keep_whole
@dataclass
class Labels:
    """Labels of all pairs of a segment, flat as the pairs are: `[total, r]`, or their codes; `made_by` says how."""

    rows: Dense | Packed
    made_by: str

    @classmethod
    def build(
        cls, segment: Segment, shorten: Callable[[Tensor, Tensor], Tensor], bits: int, made_by: str = ""
    ) -> Labels:
        """Label every key: `shorten` maps keys `[S, n, D]` of some streams `[S]` to `[S, n, r]`."""
        streams = torch.arange(segment.layout.streams, device=segment.device)
        labels = torch.cat([shorten(block.keys, streams[block.streams]).flatten(0, 1) for block in segment.blocks()])
        if bits == 16:
            return cls(Dense(labels), made_by)
        return cls(quantise(labels, bits, (1, labels.shape[1])), made_by)

    def tensors(self) -> list[Tensor]:
        """Tensors held, for the memory report."""
        return [tensor for tensor in self.rows.tensors() if tensor is not None]


class LabelSelector(Selector):
    """Reads the pairs whose labels agree best with the query: subclasses say how vectors are shortened.

    Labels have `channels` numbers, a quarter of the head dim where that is None, in `bits` bits each, and are held under the
    name `index`. The products with the query heads of a group count by their largest or their sum, as `reduce` says. Labels
    that were made under another `name` are made anew.
    """

    index: ClassVar[str]

    def __init__(self, budget: Budget, channels: int | None, bits: int, reduce: str = "max") -> None:
        self.budget, self.channels, self.bits, self.reduce = budget, channels, bits, reduce
        self.name = ""

    @abstractmethod
    def shorten(self, store: KVStore, vectors: Tensor, streams: Tensor) -> Tensor:
        """Return the labels `[S, n, r]` of keys or queries `[S, n, D]` of some `streams`, int64 `[S]`."""

    def label_channels(self, dim: int) -> int:
        """Return how many channels a label of a key of `dim` channels has."""
        step = 1 if self.bits == 16 else row_step(self.bits)
        channels = max(step, dim // QUARTER // step * step) if self.channels is None else self.channels
        if channels > dim or channels % step:
            raise ValueError(
                f"channels must be a multiple of {step} for labels of {self.bits} bits, and at most the head dim {dim} of the "
                f"model, got {channels}"
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
        """Return what `queries [q * N, G, D]` read of some `segments` of a layer; None for everything."""
        layouts = [segment.layout for segment in segments]
        if self.budget.reads_all(layouts):
            return None
        labels = [self._labels(store, segment).rows for segment in segments]
        streams = torch.arange(len(queries), device=queries.device) % segments[0].layout.streams
        asking = self.shorten(store, queries, streams)
        if len(segments) == 1:
            (layout,), where = layouts, Ranges(*spans_of(layouts[0], queries))
            rows, counts = label_rows(
                asking, labels[0], where, reduce=self.reduce, capacity=layout.longest,
                **self.budget.asked(where.lengths, layouts),
            )  # fmt: skip
            return [Chosen(rows, counts)]
        scores = [
            label_scores(
                asking, rows, Ranges(*spans_of(layout, queries)), reduce=self.reduce, capacity=layout.longest,
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
