# SPDX-License-Identifier: Apache-2.0
"""Low-rank part by optimal shrinkage of singular values, and rotated codes of the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.layout import row_numbers
from kvpress.cache.segment import DenseSegment, OfStreams, Segment
from kvpress.cache.storage import part
from kvpress.core.checks import Count, Range, Size
from kvpress.core.registry import register
from kvpress.kernels import MOST_RANK
from kvpress.quant.bits import Bits
from kvpress.quant.hadamard import hadamard
from kvpress.quant.press import QuantisingPress
from kvpress.quant.residual import Residual
from kvpress.quant.rotated import SteppedRows
from kvpress.quant.runs import Runs

EDGE = 2 ** (2 / 3) - 1
"""Constant of the square-root law by which eigenvalues of noise approach the edge of their spectrum."""
MARGIN = 1.1
"""Factor on the distance from observed eigenvalues of noise to the estimated edge."""
RUN = 4
"""Bytes of the length of a chunk."""


@register(
    "eoptshrinkq",
    "quantise",
    "after Su, 2026, arXiv:2605.02905",
    example="eoptshrinkq:bits=2",
    status="experimental",
)
@dataclass
class EOptShrinkQPress(QuantisingPress):
    """Store a low-rank part by optimal shrinkage of singular values, and codes of the rest after a rotation.

        X = sum over i of s_i u_i v_i^T,   L = sum over i <= r of eta(s_i) u_i v_i^T,   X' = L + decode(codes of X - L)

    X `[n, D]` are the keys or the values of one head that are encoded together, p = min(n, D) and k = floor(p^(1 / 2.01)). The
    rank r counts the eigenvalues s_i^2 of X^T X above the estimated edge of noise,
    e = s_(k+1)^2 + 1.1 (s_(k+1)^2 - s_(2k+1)^2) / (2^(2/3) - 1). With m1 and m2 the Stieltjes transforms of the eigenvalues of
    noise for either side of X, of which the 2 r largest are imputed, T = s^2 m1 m2 and its derivative T' at s^2, the shrunk
    value eta(s) = sqrt(m1 m2) / (|T'| d), d^2 = 1 / T, minimises the expected squared error of L.

    Codes have `bits` bits for each channel: rows of X - L are rotated by a Hadamard matrix and coded in even steps, with one
    step for each row, as in `RotatedPress`. At most `rank` columns of L are kept, in 16 bits, and zeros where r is lower, so
    that sizes are known beforehand. A prompt is encoded as one matrix for each head, and so are `buffer_length` generated
    tokens. The newest `residual_length` pairs and the first `sinks` stay dense.

    Paper: after Su, eOptShrinkQ: Near-Lossless KV Cache Compression Through Optimal Spectral Denoising and Quantization, 2026,
    arXiv:2605.02905; the shrinkage is that of Su & Wu, Data-driven optimal shrinkage of singular values under high-dimensional
    noise with separable covariance structure, 2022, arXiv:2207.03466, by the authors' public code.
    Differs from the paper: written from its abstract, not from its algorithm. Columns of L are limited to `rank`, and stored
    for all heads alike; a singular value that cannot be told from the imputed noise is left to the codes; steps are even,
    where TurboQuant has the levels of a Gaussian and a random rotation; a large bias of keys is stored separately
    (`QuantisingPress`).
    """

    bits: Bits = 2
    rank: Annotated[int, Range(1, MOST_RANK, whole=True)] = 4
    buffer_length: Count = 64
    residual_length: Size = 128
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 0

    def layer_codec(self, layer: int) -> ShrunkCodec:
        return ShrunkCodec(self.layer_bits().at(layer), self.rank, self.buffer_length, self.residual_length, self.sinks)


@dataclass
class ShrunkCodec(Codec):
    """Codec that encodes the pairs of each stream as one chunk; see `EOptShrinkQPress`."""

    bits: tuple[int, int]
    rank: int
    """Columns of the low-rank part."""
    group: int
    residual: int
    sinks: int = 0

    whole: ClassVar[bool] = True
    spread = "stream"

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        del sealing
        sides = zip((segment.keys, segment.values), self.bits, strict=True)
        keys, values = (self._side(side, bits, segment) for side, bits in sides)
        return ShrunkSegment(keys, values, segment.layout, segment.keys.dtype)

    def _side(self, side: Tensor, bits: int, segment: DenseSegment) -> ShrunkRows:
        """Encode `side [R, D]`; the basis of the low-rank part is rotated like the codes."""
        layout, hadamard_matrix = segment.layout, hadamard(side.shape[1], side.device)
        factor = torch.zeros(layout.total, self.rank, dtype=torch.float16, device=side.device)
        rest, bases = side.detach().float().clone(), []
        for n in range(layout.streams):
            rows = layout.rows(n)
            if rows.stop == rows.start:
                continue
            columns, right = shrunk(rest[rows], self.rank)
            basis = factor.new_zeros(self.rank, side.shape[1])
            basis[: len(right)] = right @ hadamard_matrix
            factor[rows, : len(right)] = columns.half()
            rest[rows] -= factor[rows].float() @ basis.float() @ hadamard_matrix.T
            bases.append(basis)
        if not bool(factor.isfinite().all()):
            raise ValueError(
                "eoptshrinkq stores the low-rank part in float16, at most 65504, but these keys or values need more; use kivi, "
                "whose scales may be float32"
            )
        chunks = Runs.of_lengths(layout.lengths, side.device)
        basis = torch.stack(bases) if bases else factor.new_zeros(0, self.rank, side.shape[1])
        coded = SteppedRows.encode(rest, rest.new_zeros(layout.streams, side.shape[1]), layout, bits)
        return ShrunkRows(coded.codes, coded.step, bits, Residual(chunks, factor, basis))

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        return dim * sum(self.bits) / 8 + 4 + 4 * self.rank

    def tile_bytes(self, pairs: int, dim: int, dtype: torch.dtype, generated: bool = False) -> float:
        return pairs * self.pair_bytes(dim, dtype) + 2 * RUN + 4 * self.rank * dim


@dataclass(eq=False)
class ShrunkRows(SteppedRows):
    """Rows in even steps, with a low-rank part in the basis of the codes."""

    residual: Annotated[Residual | None, part("corrections")] = None

    def operand(self) -> kernels.Packed:
        """Return the kernel operand."""
        correction = None if self.residual is None else self.residual.operand(len(self.codes))
        return replace(super().operand(), correction=correction)


@dataclass(eq=False, repr=False)
class ShrunkSegment(Segment):
    """Pairs rotated by a Hadamard matrix, as a low-rank part and codes."""

    keys: Annotated[ShrunkRows, part()]
    values: Annotated[ShrunkRows, part()]
    layout: OfStreams
    dtype: torch.dtype

    @property
    def computes_operands(self) -> bool:
        return True  # a chunk index for each row, from the lengths of the chunks

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        rows = row_numbers(rows, self.layout.total, self.device)
        keys, values = (
            (side.operand().read(rows) @ hadamard(side.channels, self.device).T).to(self.dtype)
            for side in (self.keys, self.values)
        )
        return keys, values

    def operand(self) -> kernels.Rows:
        key_basis, value_basis = (
            kernels.Basis(rotation=hadamard(side.channels, self.device)) for side in (self.keys, self.values)
        )
        return kernels.Rows(self.keys.operand(), self.values.operand(), self.log_weight, key_basis, value_basis)


def shrunk(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the low-rank part of `x [n, D]`, as `columns [n, r]` and `basis [r, D]`, float32, r <= `most`."""
    is_tall = x.shape[0] >= x.shape[1]
    wide = x.double()
    gram = wide.T @ wide if is_tall else wide @ wide.T
    eigenvalues, vectors = torch.linalg.eigh(gram)
    eigenvalues, vectors = eigenvalues.flip(0).clamp_min(0.0), vectors.flip(1)
    shrunk_values = shrinkage(eigenvalues, max(x.shape))[:most]
    roots = eigenvalues[: len(shrunk_values)].sqrt()
    right = vectors[:, : len(roots)] if is_tall else wide.T @ vectors[:, : len(roots)] / roots
    return (wide @ right * (shrunk_values / roots)).float(), right.T.float()


def shrinkage(eigenvalues: Tensor, longest: int) -> Tensor:
    """Return the shrunk singular values `[r]` for the eigenvalues `[p]`, descending, of the smaller Gram matrix, float64.

    `longest` is the length of the longer side of the matrix. r is 0 where p is too small to estimate the noise.
    """
    size = len(eigenvalues)
    first = math.floor(size ** (1 / 2.01))
    if 2 * first >= size:
        return eigenvalues[:0]
    edge = eigenvalues[first] + MARGIN / EDGE * (eigenvalues[first] - eigenvalues[2 * first])
    rank = int((eigenvalues > edge).sum())
    noise = imputed(eigenvalues.sqrt(), min(2 * rank, (size - 1) // 2)).square()
    spikes = eigenvalues[:rank]
    spikes = spikes[: int((spikes > noise.max()).long().cumprod(0).sum())][:, None]
    share = size / longest
    m1, slope1 = (1 / (noise - spikes)).mean(dim=1), (noise - spikes).pow(-2).mean(dim=1)
    spikes = spikes[:, 0]
    m2, slope2 = share * m1 - (1 - share) / spikes, share * slope1 + (1 - share) / spikes.square()
    slope = m1 * m2 + spikes * (slope1 * m2 + m1 * slope2)
    return (m1 * m2).sqrt() / slope.abs() * (spikes * m1 * m2).sqrt()


def imputed(values: Tensor, count: int) -> Tensor:
    """Return singular values, descending, with the `count` largest replaced by those that noise would have at its edge."""
    if not count:
        return values
    steps = torch.arange(count, dtype=values.dtype, device=values.device) / count
    ahead = (1 - steps ** (2 / 3)) / EDGE * (values[count] - values[2 * count])
    return torch.cat([values[count] + ahead, values[count:]])
