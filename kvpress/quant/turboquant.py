"""TurboQuant: one scalar book for all channels, because rotated vectors all look Gaussian."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.core.checks import Size
from kvpress.core.registry import register
from kvpress.quant import levels
from kvpress.quant.bits import Bits
from kvpress.quant.codebook import CodedRows, CodedSegment
from kvpress.quant.press import QuantisingPress


@register("turboquant", "quantise", "Zandieh et al., 2025, arXiv:2504.19874", example="turboquant:bits=3")
@dataclass
class TurboQuantPress(QuantisingPress):
    """Rotate keys and values at random, and store every channel as the nearest of `2**bits` levels beside one norm per vector.

        y = sqrt(D) * x R / |x|,   code[d] = argmin_e |y[d] - level[e]|,   x' = |x| * (level[code] / |level[code]|) R^T

    R is a random orthogonal matrix of each layer, one for keys and one for values, drawn from `seed`. It makes channels nearly
    unit Gaussian, so the levels are those of least error for that distribution (Lloyd-Max) and nothing is calibrated. |x| /
    |level[code]| is stored in 16 bits.

    Paper: Zandieh et al., TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate, 2025, arXiv:2504.19874.
    Differs from the paper: decoded vectors get their norm back; of its two variants only the one for the mean squared error is
    here, without a QJL sketch of the errors; all channels have the same bits. The newest `residual_length` pairs, up to 63
    more, and the first `sinks` stay dense.
    """

    bits: Bits = 4
    residual_length: Size = 128
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 0
    seed: int = 0

    def layer_codec(self, layer: int) -> RotatedCodec:
        return RotatedCodec(self.layer_bits().at(layer), 1000 * self.seed + 2 * layer, self.residual_length, self.sinks)


@dataclass
class RotatedCodec(Codec):
    """Codes keys rotated by the matrix of `seed` and values by that of the next seed; see `TurboQuantPress`."""

    bits: tuple[int, int]
    seed: int
    residual: int
    sinks: int = 0
    group: int = 32

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        sides = segment.keys, segment.values
        bases = [rotation(side.shape[1], self.seed + i, side.device) for i, side in enumerate(sides)]
        keys, values = map(_encode, sides, bases, self.bits)
        return CodedSegment(keys, values, segment.layout, segment.keys.dtype, key_basis=bases[0], value_basis=bases[1])

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        return dim * sum(self.bits) / 8 + 4

    def table_bytes(self, dim: int) -> int:
        return 8 * dim**2 + levels.table_bytes(self.bits)


def _encode(vectors: Tensor, basis: Tensor, bits: int) -> CodedRows:
    def rotated(rows: slice) -> Tensor:
        return vectors[rows].detach().float() @ basis

    return levels.encode(rotated, len(vectors), bits, vectors.dtype, lambda y, level: y.norm(dim=1) / level.norm(dim=1))


@cache  # segments can be joined where they hold the same objects
@torch.inference_mode(False)
def rotation(dim: int, seed: int, device: torch.device) -> Tensor:
    """Return an orthogonal matrix, float32 [D, D], drawn evenly from all."""
    q, r = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    return (q * r.diagonal().sign()).float().to(device)
