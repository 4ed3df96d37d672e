"""Centred vectors behind a Hadamard matrix, one scalar book for all channels: few bits without groups or calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.core.checks import Size
from kvpress.core.registry import register
from kvpress.quant import levels
from kvpress.quant.bits import Bits
from kvpress.quant.codebook import CodedRows, CodedSegment, hadamard
from kvpress.quant.press import QuantisingPress


@register("rotated", "quantise", example="rotated:bits=3")
@dataclass
class RotatedPress(QuantisingPress):
    """Subtract the mean of a head, rotate by a Hadamard matrix, and store the nearest of `2**bits` levels beside one scale.

        y = (x - c) H,   code[d] = argmin_e |sqrt(D) y[d] / |y| - level[e]|,   a = <y, z> / <z, z>,   x' = a z H^T + c

    z are the levels of the codes, those of least error for a unit Gaussian (Lloyd-Max); c is the mean of the pairs of a head
    that are encoded first, for keys and for values; later ones use it too. A pair takes 2 (bits D + 16) bits: every pair has a
    scale of its own, so that a prompt is encoded to its last pair. Where D is no power of two, H is made of blocks. While
    tokens are generated, the newest `residual_length` and up to 31 more stay dense, and so do the first `sinks`.

    Paper: none; of the kind of `TurboQuantPress`.
    Differs from the paper: from TurboQuant, a mean is subtracted; the matrix is that of Hadamard and the same everywhere, so
    that nothing is held of it; the scale is that of least squares instead of the norm.
    """

    bits: Bits = 2
    residual_length: Size = 32
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 0

    def layer_codec(self, layer: int) -> CentredCodec:
        return CentredCodec(self.layer_bits().at(layer), self.residual_length, self.sinks)


@dataclass
class CentredCodec(Codec):
    """Codes what differs from the mean of a stream; see `RotatedPress`."""

    bits: tuple[int, int]
    residual: int
    sinks: int = 0
    group: int = 32

    whole: ClassVar[bool] = True

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        layout, coded = segment.layout, [part for part in sealing.earlier if isinstance(part, CodedSegment)]
        stream = layout.stream_of_row.to(segment.device)
        centres, rows = [], []
        for name, side, bits in zip(
            ("key_centre", "value_centre"), (segment.keys, segment.values), self.bits, strict=True
        ):
            centre = _means(side, segment)
            for part in coded:
                held = part.layout.lengths_tensor.to(segment.device) > 0
                centre = torch.where(held[:, None], getattr(part, name), centre)
            centres.append(centre)
            rows.append(_encode(side, centre, stream, bits))
        return CodedSegment(
            rows[0], rows[1], layout, segment.keys.dtype, key_centre=centres[0], value_centre=centres[1], hadamard=True
        )

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        return dim * sum(self.bits) / 8 + 4

    def fixed_bytes(self, dim: int) -> float:
        return 4 * dim

    def table_bytes(self, dim: int) -> int:
        return levels.table_bytes(self.bits)


def _means(side: Tensor, segment: DenseSegment) -> Tensor:
    """Mean of every stream in 16 bits, `[N, D]`; zeros where it is empty."""
    dtype = torch.float16 if side.dtype == torch.float16 else torch.bfloat16
    means = torch.zeros(segment.layout.streams, side.shape[1], dtype=dtype, device=side.device)
    for n, length in enumerate(segment.layout.lengths):
        if length:
            means[n] = side[segment.layout.rows(n)].mean(dim=0, dtype=torch.float32).to(dtype)
    return means


def _encode(side: Tensor, centre: Tensor, stream: Tensor, bits: int) -> CodedRows:
    basis = hadamard(side.shape[1], side.device)

    def rotated(rows: slice) -> Tensor:
        return (side[rows].float() - centre[stream[rows]].float()) @ basis

    def fitted(y: Tensor, level: Tensor) -> Tensor:
        return (y * level).sum(dim=1) / level.square().sum(dim=1)

    return levels.encode(rotated, len(side), bits, side.dtype, fitted)
