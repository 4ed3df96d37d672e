# SPDX-License-Identifier: Apache-2.0
"""GEAR: uniform codes, a low-rank approximation of their error, and a few exact outliers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.offset import Spread
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.core.checks import Count, Range, Share, Size
from kvpress.core.model import LayerFacts
from kvpress.core.registry import register
from kvpress.kernels import MOST_RANK
from kvpress.quant.bits import Bits
from kvpress.quant.press import QuantisingPress, check_channel_group
from kvpress.quant.residual import Residual, check_outliers
from kvpress.quant.runs import Counts, Runs
from kvpress.quant.uniform import UniformRows, UniformSegment, parameter_bytes

Rank = Annotated[int, Range(0, MOST_RANK, whole=True)]
RUN = 4
"""Bytes of the length of a chunk."""


@register("gear", "quantise", "Kang et al., 2024, arXiv:2403.05527", example="gear:bits=2")
@dataclass
class GEARPress(QuantisingPress):
    """Store pairs as uniform codes plus a low-rank part plus a share of outliers.

        X ~ decode(codes) + Q P^T + S

    `outliers` is the share of entries in S: the largest and the smallest entries, half each, of every key channel of a chunk
    and of every token's values. All other entries are quantised in groups of `group_size`, keys per channel and values per
    token (`backbone="kivi"`), or with one group per key channel of a chunk and one per token's values (`"kcvt"`). Q P^T has
    rank `rank` for each head and approximates the quantisation error by `passes` rounds of power iteration; chunks of
    `buffer_length` generated tokens get `generated_rank`. Attention adds both corrections to logits and outputs, and never
    decodes keys or values as a whole.

    Paper: Kang et al., GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of LLM,
    2024, arXiv:2403.05527.
    Differs from the paper: outliers of values are chosen within each head, at least one at either end; the authors' fused
    code has no outliers and is wrong for batches; a large bias of keys is stored separately (`QuantisingPress`).
    """

    bits: Bits = 2
    group_size: Count = 64
    rank: Rank = 4
    generated_rank: Rank = 2
    outliers: Share = 0.02
    passes: Count = 3
    backbone: Literal["kivi", "kcvt"] = "kivi"
    buffer_length: Count = 64
    residual_length: Size = 0
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 0

    def validate(self) -> None:
        super().validate()
        if self.backbone == "kivi" and self.buffer_length % self.group_size:
            raise ValueError(
                f"buffer_length must be a multiple of group_size={self.group_size}, got {self.buffer_length}"
            )

    def check_shape(self, layer: LayerFacts) -> None:
        super().check_shape(layer)
        if self.backbone == "kivi":
            check_channel_group(layer.head_dim, self.group_size)
        check_outliers(layer.head_dim, self.outliers)

    def layer_codec(self, layer: int) -> GEARCodec:
        bits = self.layer_bits().at(layer)
        group = self.group_size if self.backbone == "kivi" else None
        return GEARCodec(
            *bits, group, self.rank, self.generated_rank, self.outliers, self.passes, self.buffer_length,
            self.residual_length, self.sinks,
        )  # fmt: skip


@register("gear_l", "quantise", "Kang et al., 2024, arXiv:2403.05527", example="gear_l:bits=2")
@dataclass
class GEARLPress(GEARPress):
    """GEAR without outliers: uniform codes plus a low-rank part.

    Paper: Kang et al., GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of LLM,
    2024, arXiv:2403.05527.
    Differs from the paper: as `GEARPress`.
    """

    outliers: Share = 0.0


@dataclass
class GEARCodec(Codec):
    """Codec that encodes the pairs of each stream as one chunk; see `GEARPress`."""

    key_bits: int
    value_bits: int
    channels: int | None
    """Group size; None for one group per chunk (`kcvt`)."""
    rank: int
    generated_rank: int
    outliers: float
    passes: int
    group: int
    residual: int
    sinks: int = 0

    @property
    def spread(self) -> Spread:  # type: ignore[override]
        return "stream" if self.channels is None else "tile"

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        rank = min(self.generated_rank if sealing.generated else self.rank, segment.layout.longest)
        keys, values = [], []
        for n in range(segment.layout.streams):
            rows = segment.layout.rows(n)
            if rows.stop > rows.start:
                keys.append(self._side(segment.keys[rows], self.key_bits, 0, rank))
                values.append(self._side(segment.values[rows], self.value_bits, 1, rank))
        return UniformSegment(UniformRows.concatenate(keys), UniformRows.concatenate(values), segment.layout)

    def _side(self, x: Tensor, bits: int, axis: int, rank: int) -> UniformRows:
        """Encode one chunk `[n, D]` of one stream; quantisation groups and outlier vectors run along `axis`."""
        length, dim = x.shape
        group = self.channels if self.channels is not None else length if axis == 0 else dim
        outlying = extremes(x.float(), self.outliers, axis)
        inliers = torch.where(outlying, _mean(x.float(), ~outlying, axis), x.float())
        packed = UniformRows.encode(inliers.to(x.dtype), bits, (group, 1) if axis == 0 else (1, min(group, dim)))
        if self.channels is None and axis == 0:
            packed.runs = Runs.of_lengths([length], x.device)
        error = x.float() - packed.read(slice(None)).float()
        residual = Residual(Runs.of_lengths([length], x.device))
        parameters = packed.scale.dtype
        if rank:
            factor, basis = low_rank(error.masked_fill(outlying, 0.0), min(rank, length, dim), self.passes)
            missing = min(rank, dim) - factor.shape[1]  # all streams have equally many columns
            factor, basis = pad(factor, (0, missing)), pad(basis, (0, 0, 0, missing))
            residual.factor, residual.basis = factor.to(parameters), basis.to(parameters)[None]
            error -= residual.factor.float() @ residual.basis[0].float()
        if self.outliers:
            at, channel = outlying.nonzero(as_tuple=True)
            residual.outliers = Counts(outlying.sum(dim=1).to(torch.uint8 if dim < 256 else torch.int16))
            residual.channel, residual.delta = channel.to(torch.uint8), error[at, channel].to(parameters)
        return replace(packed, residual=residual) if rank or self.outliers else packed

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        long = 2**20
        return self.tile_bytes(long, dim, dtype) / long

    def tile_bytes(self, pairs: int, dim: int, dtype: torch.dtype, generated: bool = False) -> float:
        parameter = parameter_bytes(dtype)
        rank = min(self.generated_rank if generated else self.rank, pairs, dim)
        size = pairs * dim * (self.key_bits + self.value_bits) / 8
        if self.channels is None:
            size += 2 * parameter * (dim + pairs) + RUN
        else:
            size += 2 * parameter * pairs * (dim / self.channels + dim / min(self.channels, dim))
        if rank or self.outliers:
            size += 2 * RUN
        size += 2 * parameter * rank * (pairs + dim)
        if self.outliers:
            outlying = dim * in_both_tails(pairs, self.outliers) + pairs * in_both_tails(dim, self.outliers)
            size += 2 * pairs * (1 if dim < 256 else 2) + outlying * (1 + parameter)
        return size


def in_both_tails(length: int, share: float) -> int:
    """Return how many entries of a vector are outliers; short vectors do not count an entry at both ends."""
    return min(length, 2 * tail(length, share))


def tail(length: int, share: float) -> int:
    """Return how many entries of a vector are outliers at either end."""
    return min(length, max(1, round(share / 2 * length)))


def extremes(x: Tensor, share: float, axis: int) -> Tensor:
    """Mark, in every vector of `x [n, D]` along `axis`, the largest and the smallest `share / 2` of its entries."""
    marked = torch.zeros_like(x, dtype=torch.bool)
    if share == 0:
        return marked
    count = tail(x.shape[axis], share)
    for largest in (True, False):
        marked.scatter_(axis, x.topk(count, dim=axis, largest=largest).indices, True)
    return marked


def _mean(x: Tensor, counted: Tensor, axis: int) -> Tensor:
    """Mean of the counted entries along `axis`, kept as a dimension; 0 where there are none."""
    return (x * counted).sum(dim=axis, keepdim=True) / counted.sum(dim=axis, keepdim=True).clamp_min(1)


def low_rank(error: Tensor, rank: int, passes: int) -> tuple[Tensor, Tensor]:
    """Approximate `error [n, D]` by ``factor [n, rank] @ basis [rank, D]``, by `passes` rounds of power iteration."""
    start = torch.Generator().manual_seed(0)
    basis = torch.randn(error.shape[1], rank, generator=start).to(error.device)
    factor = error @ basis
    for _ in range(passes):
        factor = torch.linalg.qr(error @ torch.linalg.qr(basis).Q).Q
        basis = error.T @ factor
    return factor, basis.T.contiguous()
