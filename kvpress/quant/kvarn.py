# SPDX-License-Identifier: Apache-2.0
"""KVarN: rotated tiles whose tokens and channels are balanced before they are encoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.core.checks import Count, Range, Size
from kvpress.core.registry import register
from kvpress.quant.bits import Bits
from kvpress.quant.press import QuantisingPress
from kvpress.quant.uniform import WHOLE_HEAD, UniformRows, UniformSegment, parameter_bytes, rotated

MOST_LOG = 9.0
"""Limit on the logarithm of factors, so that float16 can store each factor and its inverse."""


@register("kvarn", "quantise", "2026, arXiv:2606.03458", example="kvarn:bits=(4,4)")
@dataclass
class KVarNPress(QuantisingPress):
    """Rotate, balance tokens against channels, and store keys per channel over a tile of tokens and values per token.

        Y = X H,   Y[t, d] / (a[t] b[d]) has rows and columns of one standard deviation
        keys      code = round((Y[t, d] / a[t] - min) / s),   min and s per channel and tile
        values    code = round((Y[t, d] / b[d] - min) / s),   min and s per token

    H is a Hadamard matrix. The factors a and b come from `iterations` rounds that divide rows and columns by their standard
    deviations in turn; the most balanced round is used. The scale of each token is thus stored separately, since a scale that
    does not fit its token is the main error in long generations. `tile_size` tokens are encoded together; up to
    `residual_length + 2 * tile_size - 2` of the newest pairs (on a GPU, which encodes generated pairs 256 or more at a time,
    256 - `tile_size` more) and the first `sinks` stay dense. `bits` is one number, a pair (keys, values), a list with either
    for every layer, or a file of them; `skip_layers` stay dense.

    Paper: KVarN, 2026, arXiv:2606.03458; the rounds follow the authors' code.
    Differs from the paper: a tile is divided by its root mean square before it is balanced, and factors have no lower limit,
    where the limit of 0.74 in the paper leaves tiles of small numbers unbalanced; b is computed once for a head, on its first
    encoded pairs, where the paper has one for every tile of values; a large bias of keys is stored separately
    (`QuantisingPress`).
    """

    bits: Bits = (4, 2)
    tile_size: Count = 128
    iterations: Annotated[int, Range(0, 64, whole=True)] = 8
    residual_length: Size = 0
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 128

    def layer_codec(self, layer: int) -> BalancedCodec:
        bits = self.layer_bits().at(layer)
        return BalancedCodec(bits, self.tile_size, self.residual_length, self.sinks, self.iterations)


@dataclass
class BalancedCodec(Codec):
    """Codec of tiles of `group` pairs; see `KVarNPress`."""

    bits: tuple[int, int]
    group: int
    residual: int
    sinks: int = 0
    iterations: int = 8

    spread = "stream"  # its tiles are long

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        dtype = segment.keys.dtype
        keys, values = (rotated(side.float(), WHOLE_HEAD) for side in (segment.keys, segment.values))
        tiles = keys.unflatten(0, (-1, self.group))
        factor = balance(tiles, self.iterations)[0].flatten().half()
        coded = UniformRows.encode(keys / factor.float()[:, None], self.bits[0], (self.group, 1), dtype)
        coded.row_scale = factor
        scale = self._channel_scale(values, segment, sealing)
        values = values / scale[segment.layout.stream_of_row.to(scale.device)]
        mixed = UniformRows.encode(values, self.bits[1], (1, values.shape[1]), dtype)
        return UniformSegment(coded, mixed, segment.layout, scale, WHOLE_HEAD)

    def _channel_scale(self, values: Tensor, segment: DenseSegment, sealing: Sealing) -> Tensor:
        """Return the channel factors of every stream, float32 [N, D]: those of its earlier pairs, else new ones."""
        layout = segment.layout
        scale = torch.ones(layout.streams, values.shape[1], device=values.device)
        for n, length in enumerate(layout.lengths):
            if length:
                scale[n] = balance(values[None, layout.rows(n)], self.iterations)[1][0]
        for earlier in sealing.earlier:
            if isinstance(earlier, UniformSegment) and earlier.channel_scale is not None:
                has_pairs = earlier.layout.lengths_tensor.to(scale.device) > 0
                scale = torch.where(has_pairs[:, None], earlier.channel_scale, scale)
        return scale

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        parameters = 2 * parameter_bytes(dtype) * (dim / self.group + 1)
        return dim * sum(self.bits) / 8 + parameters + 2

    def fixed_bytes(self, dim: int) -> float:
        return 4 * dim


def balance(tiles: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    """Return row factors `[T, R]` and column factors `[T, C]` that equalise the standard deviations in tiles `[T, R, C]`.

    Each round divides columns, then rows, by their standard deviations. The round with the smallest ratios of largest to
    smallest deviation is returned; the unchanged tile is also a candidate.
    """
    size = tiles.square().mean((1, 2), keepdim=True).sqrt()
    tiles = tiles / torch.where(size > 0, size, 1.0)
    logs = tiles.new_zeros(tiles.shape[:2]), tiles.new_zeros(len(tiles), tiles.shape[2])
    best, best_spread = logs, tiles.new_full((len(tiles),), torch.inf)
    for step in range(iterations + 1):
        balanced = tiles * (-logs[0]).exp()[:, :, None] * (-logs[1]).exp()[:, None, :]
        spread = _imbalance(balanced, 1) + _imbalance(balanced, 2)
        better = (spread < best_spread)[:, None]
        best = torch.where(better, logs[0], best[0]), torch.where(better, logs[1], best[1])
        best_spread = torch.minimum(best_spread, spread)
        if step < iterations:
            columns = (logs[1] + _deviation(balanced, 1).log()).clamp(-MOST_LOG, MOST_LOG)
            balanced = tiles * (-logs[0]).exp()[:, :, None] * (-columns).exp()[:, None, :]
            logs = (logs[0] + _deviation(balanced, 2).log()).clamp(-MOST_LOG, MOST_LOG), columns
    return best[0].exp(), best[1].exp()


def _deviation(tiles: Tensor, dim: int) -> Tensor:
    """Return standard deviations along a dimension, within [1e-3, 1e3]."""
    return tiles.std(dim, correction=min(1, tiles.shape[dim] - 1)).clamp(1e-3, 1e3)


def _imbalance(tiles: Tensor, dim: int) -> Tensor:
    deviation = _deviation(tiles, dim)
    return deviation.amax(1) / deviation.amin(1)
