# SPDX-License-Identifier: Apache-2.0
"""OSCAR: rotations from the covariance that attention sees, clipped codes with a scale and a zero per vector."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.segment import DenseSegment, OfStreams, Segment
from kvpress.cache.segment_attention import BLOCK_ROWS
from kvpress.cache.storage import part, per_layer
from kvpress.core.checks import Count, Range, Size
from kvpress.core.model import LayerFacts
from kvpress.core.registry import Refusal, register
from kvpress.quant.bits import Bits
from kvpress.quant.calibrated import CalibratedPress
from kvpress.quant.hadamard import hadamard
from kvpress.quant.press import check_channel_group
from kvpress.quant.uniform import UniformRows, parameter_bytes

METHOD = "oscar"
Clip = Annotated[float, Range(0, 1, above=True)]


@register(
    "oscar",
    "quantise",
    "Zhou et al., 2026, arXiv:2605.17757",
    example="oscar:bits=2",
    needs="rotations of the model: `kvpress calibrate oscar` (`calibration`)",
    refuses=(
        Refusal("oscar:bits=2", "without a file of its own, a model other than the bundled reference model"),
        Refusal("oscar:key_clip=0", "nothing would be left of a key"),
    ),
)
@dataclass
class OscarPress(CalibratedPress):
    """Rotate pairs by a basis of the directions that attention reads most, clip them, and store each in `bits` bits.

        C_K    = mean over heads of C_h,   C_h = mean of q q^T over tokens and query heads of KV head h
        w[t]   = k[t]^T C_h k[t], scaled to mean 1 over tokens
        C_V    = mean over heads and tokens of w[t] v[t] v[t]^T
        R      = U H P,   U the eigenvectors of C_K for keys and of C_V for values, by rising eigenvalue
        y      = x R, with |y[d]| <= the floor(clip D)-th smallest of |y[0]|, ..., |y[D - 1]|, counted from 0
        code   = round((y - min) / s),   s = (max - min) / (2**bits - 1),   x' = (code * s + min) R^T

    q and k have their rotary embedding. H is the Hadamard matrix, and P reverses the bits of the channel numbers, by falling
    eigenvalue, which spreads large directions over groups of channels. `calibration` is a file made by `kvpress calibrate
    oscar`, with one R for keys and one for values of each layer; the bundled reference model needs none. Stored pairs are not
    rotated back: attention rotates the queries and the output. `key_clip` and `value_clip` are 1 for no clipping.
    `group_size` neighbouring channels share a scale and a zero, by default a whole head. `bits` is one number, a pair (keys,
    values), a list with either for every layer, or a file of them. The newest `residual_length` pairs of every head and its
    first `sinks` stay dense, and up to 31 more while tokens are generated (255 on a GPU). `skip_layers` stay dense.

    Paper: Zhou et al., OSCAR: Offline Spectral Covariance-Aware Rotation for 2-bit KV Cache Quantization, 2026,
    arXiv:2605.17757; follows the authors' code.
    Differs from the paper: the rotation of values is not folded into the output projection; the first 4 tokens of each
    calibration text are left out; P is the given order where the head dim is no power of two, and H consists of blocks;
    scales have 16 bits in models of 16 bits; a large bias of keys is stored separately (`QuantisingPress`).
    """

    bits: Bits = 2
    key_clip: Clip = 0.96
    value_clip: Clip = 0.92
    group_size: Count | None = None
    calibration: str | None = None
    residual_length: Size = 256
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 64

    method: ClassVar[str] = METHOD
    tables: ClassVar[str] = "rotations"
    before_rotary: ClassVar[bool] = False

    def held(self, layer: LayerFacts) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("keys", "values"), (layer.head_dim, layer.head_dim))

    def check_shape(self, layer: LayerFacts) -> None:
        super().check_shape(layer)
        if self.group_size is not None:
            check_channel_group(layer.head_dim, self.group_size)
        if layer.value_dim is not None:
            raise NotImplementedError("the model caches latents, which have no values to rotate")

    def layer_codec(self, layer: int) -> OscarCodec:
        keys, values = (self.found().tensors[f"{layer}.{side}"] for side in ("keys", "values"))
        clips, bits = (self.key_clip, self.value_clip), self.layer_bits().at(layer)
        return OscarCodec(keys, values, bits, clips, self.group_size, self.residual_length, self.sinks)


@dataclass
class OscarCodec(Codec):
    """Codec of clipped and rotated vectors; see `OscarPress`."""

    key_basis: Tensor
    """Rotation of keys, orthonormal float32 `[D, D]`."""
    value_basis: Tensor
    """Rotation of values, orthonormal float32 `[D, D]`."""
    bits: tuple[int, int]
    clips: tuple[float, float]
    """Share of the channels of a key, and of a value, that clipping leaves unchanged."""
    channels: int | None
    """Channels that share a scale, limited to the head dim; None for all."""
    residual: int
    sinks: int = 0
    group: int = 32

    whole: ClassVar[bool] = True
    spread = "length"

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        bases = self._tables(sealing, segment.device)
        sides = zip((segment.keys, segment.values), bases, self.bits, self.clips, strict=True)
        keys, values = (
            UniformRows.encode(
                torch.cat([clipped(rows.detach().float() @ basis, clip) for rows in side.split(BLOCK_ROWS)]),
                bits,
                (1, min(self.channels or side.shape[1], side.shape[1])),
                side.dtype,
            )
            for side, basis, bits, clip in sides
        )
        return OscarSegment(keys, values, segment.layout, *bases)

    def _tables(self, sealing: Sealing, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the rotations, shared by all segments of a layer."""
        for earlier in sealing.earlier:
            if isinstance(earlier, OscarSegment):
                return earlier.key_basis, earlier.value_basis
        return self.key_basis.to(device), self.value_basis.to(device)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        return dim * sum(self.bits) / 8 + 4 * parameter_bytes(dtype) * dim / min(self.channels or dim, dim)

    def table_bytes(self, dim: int) -> int:
        return self.key_basis.nbytes + self.value_basis.nbytes


@dataclass(eq=False, repr=False)
class OscarSegment(Segment):
    """Pairs times a rotation of the layer, uniformly quantised by vector."""

    keys: Annotated[UniformRows, part()]
    values: Annotated[UniformRows, part()]
    layout: OfStreams
    key_basis: Annotated[Tensor, per_layer("tables")]
    value_basis: Annotated[Tensor, per_layer("tables")]

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        sides = (self.keys, self.key_basis), (self.values, self.value_basis)
        keys, values = ((side.read(rows).float() @ basis.T).to(side.dtype) for side, basis in sides)
        return keys, values

    def operand(self) -> kernels.Rows:
        key_basis, value_basis = (kernels.Basis(rotation=basis) for basis in (self.key_basis, self.value_basis))
        return kernels.Rows(self.keys.operand(), self.values.operand(), self.log_weight, key_basis, value_basis)


def clipped(rows: Tensor, share: float) -> Tensor:
    """Return `rows [R, D]` with absolute values of at most the one of rank floor(share * D), counted from 0, of each row."""
    dim = rows.shape[1]
    bound = rows.abs().sort(dim=1).values[:, min(int(share * dim), dim - 1), None]
    return rows.clamp(-bound, bound)


def basis_of(covariance: Tensor) -> Tensor:
    """Return the rotation R of a covariance `[D, D]`, orthonormal float32 `[D, D]`; see `OscarPress`."""
    covariance = covariance.double().cpu()
    vectors: Tensor = torch.linalg.eigh((covariance + covariance.T) / 2).eigenvectors  # by rising eigenvalue
    mixed = vectors @ hadamard(len(vectors), torch.device("cpu")).double()
    order = torch.empty(len(vectors), dtype=torch.int64)
    order[reversed_bits(len(vectors))] = torch.arange(len(vectors)).flip(0)
    return mixed[:, order].float().contiguous()


def reversed_bits(count: int) -> Tensor:
    """Return the numbers below `count` with their binary digits reversed, int64; unchanged where it is no power of two."""
    numbers = torch.arange(count)
    if count & (count - 1):
        return numbers
    reverse = torch.zeros_like(numbers)
    for _ in range(count.bit_length() - 1):
        reverse, numbers = 2 * reverse + numbers % 2, numbers // 2
    return reverse
