# SPDX-License-Identifier: Apache-2.0
"""TurboQuant: one scalar codebook for all channels, because channels of rotated vectors are nearly Gaussian."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.cache.segment_attention import BLOCK_ROWS
from kvpress.core.checks import Size
from kvpress.core.registry import register
from kvpress.kernels import pack
from kvpress.quant.bits import Bits
from kvpress.quant.codebook import CodedRows, CodedSegment
from kvpress.quant.press import QuantisingPress


@register("turboquant", "quantise", "Zandieh et al., 2025, arXiv:2504.19874", example="turboquant:bits=3")
@dataclass
class TurboQuantPress(QuantisingPress):
    """Rotate keys and values at random, and store channels as the nearest of `2**bits` levels; short prompts hold more bits.

        y = sqrt(D) * x R / |x|,   code[d] = argmin_e |y[d] - level[e]|,   x' = |x| * (level[code] / |level[code]|) R^T

    R is a random orthogonal matrix of each layer, one for keys and one for values, drawn from `seed`. It makes channels nearly
    unit Gaussian, so the levels minimise the error for this distribution (Lloyd-Max) and need no calibration. |x| /
    |level[code]|, one number per vector, is stored in 16 bits.

    At short lengths more is held than `bits`: with 1024 tokens of SmolLM2 (64 channels, 3 KV heads) `bits=3` takes 5.5 bits a
    value: 3.25 in codes and norms, 0.67 in the matrices R of each layer in float32, and the remainder in the dense newest pairs
    (`kvpress plan --model smollm2 --context 1024 --press turboquant:bits=3`). `residual_length=0` takes 3.9.

    Paper: Zandieh et al., TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate, 2025, arXiv:2504.19874.
    Differs from the paper: decoded vectors are scaled to their exact norm; no bit holds the sign of the error (QJL), which
    raised the error of attention at 2, 3 and 4 bits; all channels have the same bits. The newest `residual_length` pairs, up
    to 63 more, and the first `sinks` stay dense. A large bias of keys is stored separately (`QuantisingPress`).
    """

    bits: Bits = 4
    residual_length: Size = 128
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 0
    seed: Size = 0

    def layer_codec(self, layer: int) -> RotatedCodec:
        bits = self.layer_bits().at(layer)
        return RotatedCodec(bits, 1000 * self.seed + 2 * layer, self.residual_length, self.sinks)


@dataclass
class RotatedCodec(Codec):
    """Codec of randomly rotated keys and values; see `TurboQuantPress`."""

    bits: tuple[int, int]
    seed: int
    """Seed of the rotation of keys; values use `seed + 1`."""
    residual: int
    sinks: int = 0
    group: int = 32

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        sides = segment.keys, segment.values
        bases = [rotation(side.shape[1], self.seed + i, side.device) for i, side in enumerate(sides)]
        keys, values = map(encode, sides, bases, self.bits)
        return CodedSegment(keys, values, segment.layout, segment.keys.dtype, None, *bases)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        return dim * sum(self.bits) / 8 + 4

    def table_bytes(self, dim: int) -> int:
        keys, values = (4 * (1 << bits) for bits in self.bits)
        return 8 * dim**2 + keys + (0 if keys == values else values)


def encode(vectors: Tensor, basis: Tensor, bits: int) -> CodedRows:
    """Encode rows `[R, D]` in a basis `[D, D]` by the nearest levels, in blocks that keep float32 copies small."""
    book, codes, scales = levels(bits, vectors.device), [], []
    edges, length = (book[0, 0, 1:, 0] + book[0, 0, :-1, 0]) / 2, vectors.shape[1] ** 0.5
    for part in vectors.split(BLOCK_ROWS):
        rotated = part.detach().float() @ basis
        norm = rotated.norm(dim=1, keepdim=True)
        nearest = below(edges, rotated * (length / norm.clamp_min(1e-30)))
        codes.append(pack(nearest, bits))
        scales.append(norm[:, 0] / book.flatten().index_select(0, nearest.flatten().int()).view_as(rotated).norm(dim=1))
    # The norms of a float16 model fit into float16; all others fit into bfloat16.
    dtype = torch.float16 if vectors.dtype == torch.float16 else torch.bfloat16
    return CodedRows(torch.cat(codes), book, bits, torch.cat(scales).to(dtype))


def below(edges: Tensor, numbers: Tensor) -> Tensor:
    """Count the ascending edges below each number, uint8; up to 15 edges are compared in a loop, ten times as fast."""
    if len(edges) > 15:
        return torch.bucketize(numbers, edges, out_int32=True).to(torch.uint8)
    counts = torch.zeros(numbers.shape, dtype=torch.uint8, device=numbers.device)
    for edge in edges:
        counts += numbers > edge
    return counts


@cache  # segments can be joined only if they share the same tensor object
@torch.inference_mode(False)
def rotation(dim: int, seed: int, device: torch.device) -> Tensor:
    """Return an orthogonal matrix, float32 [D, D], drawn from the uniform (Haar) distribution."""
    q, r = torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
    orthogonal: Tensor = q * r.diagonal().sign()
    return orthogonal.float().to(device)


@cache
@torch.inference_mode(False)
def levels(bits: int, device: torch.device) -> Tensor:
    """Return the levels that quantise a unit Gaussian with the least mean squared error, float32 [1, 1, E, 1]."""
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1)
    level: Tensor = 3**0.5 * normal.icdf((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
    for _ in range(1000):  # each level moves to the mean of its interval
        edges = torch.cat([level.new_tensor([-torch.inf]), (level[1:] + level[:-1]) / 2, level.new_tensor([torch.inf])])
        level = -normal.log_prob(edges).exp().diff() / normal.cdf(edges).diff()
    return level.float().view(1, 1, -1, 1).to(device)
