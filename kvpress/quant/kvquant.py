# SPDX-License-Identifier: Apache-2.0
"""KVQuant: non-uniform levels fitted to a model, keys before their rotary embedding, and a few exact outliers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.rotation import angle_bytes, rotation_of
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.core.checks import Share, Size
from kvpress.core.model import LayerFacts
from kvpress.core.registry import Refusal, register
from kvpress.kernels import pack
from kvpress.quant.bits import Bits
from kvpress.quant.calibrated import CalibratedPress
from kvpress.quant.codebook import CodedRows, CodedSegment
from kvpress.quant.residual import Residual, check_outliers
from kvpress.quant.runs import Counts, Runs
from kvpress.quant.turboquant import below
from kvpress.quant.uniform import parameter_bytes

METHOD = "kvquant"
FITTED_BITS = (2, 3, 4)
TILE = 32
"""Number of pairs of a head that share one choice of outliers."""


@register(
    "kvquant",
    "quantise",
    "Hooper et al., 2024, arXiv:2401.18079",
    example="kvquant:bits=3",
    needs="levels of the model: `kvpress calibrate kvquant` (`calibration`)",
    refuses=(
        Refusal("kvquant:bits=3", "without a file of its own, a model other than the bundled reference model"),
        Refusal("kvquant:bits=8", "levels are fitted for 2, 3 and 4 bits"),
    ),
)
@dataclass
class KVQuantPress(CalibratedPress):
    """Store channels as the nearest of `2**bits` levels fitted to the model, and a share of outliers in 16 bits.

        keys      x' = z[d] + r[d] * level[code],   z and r from the range of channel d in the calibration
        values    x' = r[t] * level[code],          r[t] is the largest magnitude of token t without its outliers

    Each layer has one list of levels for keys and one for values, fitted by weighted k-means. Keys
    are encoded before their rotary embedding and rotated when they are read. Of every 32 pairs of a head, a share `outliers`
    of the numbers is also stored in 16 bits: for keys, the numbers furthest from the middle of their channel relative to its
    range, and for values, the largest numbers relative to their token; 0 stores none. `calibration` is a file made by
    `kvpress calibrate kvquant`, which serves all widths; the bundled reference model needs none. `bits` is 2, 3 or
    4, a pair (keys, values), a list with either for every layer, or a file of them. Pairs are encoded 32 at a time; the newest
    `residual_length` and the first `sinks` stay dense, as do the layers in `skip_layers`.

    Paper: Hooper et al., KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache Quantization, 2024,
    arXiv:2401.18079.
    Differs from the paper: the number of outliers is fixed for every 32 pairs of a head, where its limits are percentiles, so
    that the size is known beforehand; values have no zero point; levels are not adjusted afterwards (Q-Norm); squared
    gradients weigh errors in the units of the keys, not of their normalised channels.
    """

    bits: Bits = 4
    outliers: Share = 0.01
    calibration: str | None = None
    residual_length: Size = 0
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 4

    allowed_bits: ClassVar[tuple[int, ...]] = FITTED_BITS
    method: ClassVar[str] = METHOD
    tables: ClassVar[str] = "levels"

    def held(self, layer: LayerFacts) -> dict[str, tuple[int, ...]]:
        ranges: dict[str, tuple[int, ...]] = {name: (layer.kv_heads, layer.head_dim) for name in ("low", "high")}
        return ranges | {f"{side}.{bits}": (2**bits,) for side in ("keys", "values") for bits in FITTED_BITS}

    def check_shape(self, layer: LayerFacts) -> None:
        super().check_shape(layer)
        check_outliers(layer.head_dim, self.outliers)

    def layer_codec(self, layer: int) -> LevelCodec:
        bits, tensors = self.layer_bits().at(layer), self.found().tensors
        low, high = (tensors[f"{layer}.{name}"].float() for name in ("low", "high"))
        levels = [tensors[f"{layer}.{side}.{b}"] for side, b in zip(("keys", "values"), bits, strict=True)]
        return LevelCodec(
            *centre_and_reach(low, high), levels[0], levels[1], bits, self.outliers, self.residual_length, self.sinks
        )


@dataclass
class LevelCodec(Codec):
    """Codec of pairs with the levels of one layer; see `KVQuantPress`."""

    centre: Tensor
    """Middle of the range of each key channel, `[H, D]`."""
    reach: Tensor
    """Half the range of each key channel, `[H, D]`."""
    key_levels: Tensor
    value_levels: Tensor
    bits: tuple[int, int]
    outliers: float
    residual: int
    sinks: int = 0
    group: int = TILE

    slot_bytes: ClassVar[int] = 4
    spread = None

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        layout, dtype = segment.layout, segment.keys.dtype
        rotation = rotation_of(sealing, segment)
        keys = segment.keys.float() if rotation is None else rotation.unrotate(segment)
        head = layout.stream_of_row.to(segment.device) % len(self.centre)
        normal = (keys - self.centre.to(segment.device)[head]) / self.reach.to(segment.device)[head]
        books = self._books(sealing, segment.device)
        outlying = largest(normal.abs(), self.outliers, self.group)
        coded = CodedRows(pack(nearest(normal, self.key_levels), self.bits[0]), books[0], self.bits[0])
        coded.residual = left_over(keys, coded, head, outlying, self.outliers, dtype)
        normal, scale, outlying = by_token(segment.values, self.outliers, self.group)
        mixed = CodedRows(pack(nearest(normal, self.value_levels), self.bits[1]), books[1], self.bits[1], scale)
        mixed.residual = left_over(segment.values, mixed, head, outlying, self.outliers, dtype)
        return CodedSegment(coded, mixed, layout, dtype, rotation)

    def _books(self, sealing: Sealing, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the codebooks of keys `[H, D, E, 1]` and values `[H, 1, E, 1]`, shared by all segments of a layer."""
        for earlier in sealing.earlier:
            if isinstance(earlier, CodedSegment):
                return earlier.keys.book, earlier.values.book
        keys = self.centre[..., None] + self.reach[..., None] * self.key_levels.float()
        values = self.value_levels.expand(len(keys), 1, -1)
        return keys[..., None].half().to(device), values[..., None].half().contiguous().to(device)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        size = dim * sum(self.bits) / 8 + 2
        if count := most_outliers(self.group, dim, self.outliers):
            size += 2 * ((1 if dim < 256 else 2) + count / self.group * (1 + parameter_bytes(dtype)))
        return size

    def table_bytes(self, dim: int) -> int:
        heads, (key_bits, value_bits) = len(self.centre), self.bits
        return 2 * heads * (dim * (1 << key_bits) + (1 << value_bits))

    def shared_bytes(self, tokens: int, dim: int) -> int:
        return angle_bytes(tokens, dim)


def centre_and_reach(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the middle of the ranges from `low` to `high`, and half their width, or 1 for an empty range."""
    reach = (high - low) / 2
    return (high + low) / 2, torch.where(reach > 0, reach, 1.0)


def nearest(numbers: Tensor, levels: Tensor) -> Tensor:
    """Return the codes of the nearest of ascending levels, uint8."""
    levels = levels.float().to(numbers.device)
    return below((levels[1:] + levels[:-1]) / 2, numbers)


def most_outliers(tile: int, dim: int, share: float) -> int:
    """Return how many numbers of a tile are outliers."""
    return round(share * tile * dim)


def largest(sizes: Tensor, share: float, tile: int) -> Tensor:
    """Mark the largest entries, a share `share`, in every `tile` rows of `sizes [R, D]`."""
    tiles = sizes.unflatten(0, (-1, tile)).flatten(1)
    marks = torch.zeros_like(tiles, dtype=torch.bool)
    marks.scatter_(1, tiles.topk(most_outliers(tile, sizes.shape[1], share), dim=1).indices, True)
    return marks.view_as(sizes)


def by_token(values: Tensor, share: float, tile: int) -> tuple[Tensor, Tensor, Tensor]:
    """Find the outliers of values `[R, D]` and divide every row by the largest magnitude of its other numbers.

    Returns:
        The quotients, float32 [R, D]; the divisors, bfloat16 or float16 [R]; the outliers, bool [R, D].
    """
    sizes = values.float().abs()
    outlying = largest(sizes / sizes.square().mean(1, keepdim=True).sqrt().clamp_min(1e-30), share, tile)
    magnitude = sizes.masked_fill(outlying, 0).amax(1)
    scale = torch.where(magnitude > 0, magnitude, 1.0).to(
        torch.float16 if values.dtype == torch.float16 else torch.bfloat16
    )
    return values.float() / scale.float()[:, None], scale, outlying


def left_over(
    exact: Tensor, coded: CodedRows, head: Tensor, outlying: Tensor, share: float, dtype: torch.dtype
) -> Residual | None:
    """Return the outlier residuals, value minus decoded code, float16 or float32 by the model's dtype; None if `share` is 0."""
    if not share:
        return None
    row, channel = outlying.nonzero(as_tuple=True)
    read = coded.read(torch.arange(len(outlying), device=outlying.device), head)
    counts = outlying.sum(1).to(torch.uint8 if outlying.shape[1] < 256 else torch.int16)
    delta = (exact.float() - read)[row, channel].to(torch.float32 if dtype == torch.float32 else torch.float16)
    return Residual(Runs(1), outliers=Counts(counts), channel=channel.to(torch.uint8), delta=delta)
