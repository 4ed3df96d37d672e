# SPDX-License-Identifier: Apache-2.0
"""Storage of keys in a subset of their channels, and the base of codecs that use it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import Logits, Partial
from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.segment import DenseSegment, OfStreams, Segment
from kvpress.cache.storage import per_pair, per_stream
from kvpress.core.model import ModelFacts


def refuse_latents(model: ModelFacts | None) -> None:
    """Refuse a model whose cache holds no keys."""
    for layer in () if model is None else model.growing:
        if layer.value_dim is not None:
            raise NotImplementedError(
                f"{model.name if model else ''} caches latents instead of keys: their channels cannot be pruned"
            )


class ThinCodec(Codec):
    """Codec that stores keys in `width` of their channels, chosen by stream; values stay dense."""

    spread = None

    @abstractmethod
    def width(self, dim: int) -> int:
        """Return how many of `dim` channels are stored."""

    @abstractmethod
    def channels(self, segment: DenseSegment, sealing: Sealing, stream: Tensor) -> Tensor:
        """Return the channels of every stream, int16 `[N, C]`, ascending; `stream [total]` is the stream of every pair."""

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        stream = segment.layout.stream_of_row.to(segment.device)
        channels = self.channels(segment, sealing, stream)
        keys = segment.keys.gather(1, channels.long()[stream])
        return ThinnedSegment(keys, segment.values.detach(), channels, segment.layout, dim=segment.keys.shape[1])

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        return (self.width(dim) + dim) * dtype.itemsize

    def fixed_bytes(self, dim: int) -> float:
        return 2 * self.width(dim)


@dataclass(eq=False, repr=False)
class ThinnedSegment(Segment):
    """Keys `[total, C]` in the channels of their streams, and dense values `[total, Dv]`."""

    keys: Annotated[Tensor, per_pair("dense")]
    values: Annotated[Tensor, per_pair("dense")]
    channels: Annotated[Tensor, per_stream("indexes")]
    """Stored channels of each stream, int16 `[N, C]`."""
    layout: OfStreams
    dim: int = 0
    """Head dim before pruning."""

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        kept = self.keys[rows]
        if isinstance(rows, slice):
            rows = torch.arange(*rows.indices(self.layout.total), device=kept.device)
        channels = self.channels[self.layout.streams_of(rows)].long()
        return kept.new_zeros(len(kept), self.dim).scatter_(1, channels, kept), self.values[rows]

    def operand(self) -> kernels.Rows:
        return kernels.Rows(kernels.Dense(self.keys), kernels.Dense(self.values), log_weight=self.log_weight)

    def attend(self, queries: Tensor, logits: Logits, hidden: Tensor | None = None) -> Partial:
        served = hidden is None and self.serves(queries, logits)
        return super().attend(self._narrow(queries) if served else queries, logits, hidden)

    def attend_rows(
        self, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor, streams: Tensor | None = None
    ) -> Partial:
        narrow_queries = self._narrow(queries, streams) if self.serves(queries, logits) else queries
        return super().attend_rows(narrow_queries, logits, rows, counts, streams)

    def mass(self, queries: Tensor, logits: Logits, lse: Tensor) -> Tensor:
        return super().mass(self._narrow(queries) if kernels.available(self.keys) else queries, logits, lse)

    def _narrow(self, queries: Tensor, streams: Tensor | None = None) -> Tensor:
        """Return the channels of `queries [q * N, M, D]` that `streams` store; by default streams 0 to N - 1 repeat."""
        if streams is None:
            streams = torch.arange(len(queries), device=queries.device) % self.layout.streams
        index = self.channels[streams].long()
        return queries.gather(2, index[:, None].expand(-1, queries.shape[1], -1))
