# SPDX-License-Identifier: Apache-2.0
"""Uniform quantisation with a scale and a zero per block: the storage behind every uniform method.

A value at row r, channel c is ``code * scale[b, c // channels] + zero[b, c // channels]``, where b is the block of row r. With
``group = (rows, channels)`` blocks are runs of `rows` rows: (32, 1) is per channel over 32 tokens, (1, 32) is per token
over 32 channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.layout import Layout, row_numbers
from kvpress.cache.offset import Spread
from kvpress.cache.segment import DenseSegment, OfStreams, Segment
from kvpress.cache.segment_attention import BLOCK_ROWS
from kvpress.cache.storage import Held, Joint, RowChoice, part, per_group, per_pair, per_stream
from kvpress.quant.hadamard import hadamard
from kvpress.quant.residual import Residual
from kvpress.quant.runs import Runs

WHOLE_HEAD = 2**30
"""Sentinel for a number of channels: all channels of a head."""


@dataclass(eq=False)
class UniformRows(Held):
    """Quantised rows: `codes [R, D * bits / 8]` uint8, `scale` and `zero [blocks, D / channel_group]`.

    Rows that survive an eviction keep the scale they were encoded with.
    """

    codes: Annotated[Tensor, per_pair("codes")]
    scale: Annotated[Tensor, per_group("scales", axis="runs")]
    zero: Annotated[Tensor, per_group("scales", axis="runs")]
    runs: Annotated[Runs, part("scales")]
    """Map from rows to blocks."""
    bits: int
    channel_group: int
    """Number of channels that share a scale."""
    dtype: torch.dtype
    """Dtype of decoded rows."""
    residual: Annotated[Residual | None, part("corrections")] = None
    """Correction added to decoded rows."""
    row_scale: Annotated[Tensor | None, per_pair("scales")] = None
    """Factor of each decoded row, `[R]`."""

    @classmethod
    def encode(cls, values: Tensor, bits: int, group: tuple[int, int], dtype: torch.dtype | None = None) -> UniformRows:
        """Quantise `values [R, D]` to the nearest of `2**bits` levels between the extremes of each block.

        `dtype` is the dtype of decoded rows, by default the dtype of `values`.
        """
        dtype = dtype or values.dtype
        packed = kernels.quantise(values, bits, group, dtype=dtype)
        assert packed.zero is not None  # noqa: S101 - for the type checker
        return cls(packed.codes, packed.scale, packed.zero, Runs(group[0]), bits, group[1], dtype)

    @staticmethod
    def concatenate(parts: Sequence[UniformRows]) -> UniformRows:
        """Concatenate the rows of all parts."""
        return parts[0]._join(parts, Joint([Layout([len(side.codes)]) for side in parts]))

    def take(self, rows: Tensor) -> UniformRows:
        """Return the selected rows, with only the scales and zeros of their blocks."""
        layout = Layout([len(rows)])
        return self._take(RowChoice(rows, layout, layout))

    def read(self, rows: Tensor | slice) -> Tensor:
        """Return decoded rows `[n, D]` in `dtype`."""
        rows = row_numbers(rows, len(self.codes), self.codes.device)
        block = self.runs.of(rows)
        codes: Tensor = kernels.unpack(self.codes[rows], self.bits).unflatten(-1, (-1, self.channel_group)).float()
        values = (codes * self.scale[block].float()[..., None] + self.zero[block].float()[..., None]).flatten(-2)
        if self.row_scale is not None:
            values *= self.row_scale[rows, None].float()
        if self.residual is not None:
            values += self.residual.operand(len(self.codes)).dense(rows, values.shape[1])
        return values.to(self.dtype)

    @property
    def group(self) -> tuple[int, int]:
        """Rows and channels that share a scale."""
        return self.runs.size, self.channel_group

    def operand(self) -> kernels.Packed:
        """Return the kernel operand."""
        total = len(self.codes)
        correction = None if self.residual is None else self.residual.operand(total)
        return kernels.Packed(
            self.codes,
            self.scale,
            self.zero,
            self.bits,
            self.group,
            self.runs.lengths,
            correction,
            row_scale=self.row_scale,
        )


@dataclass(eq=False, repr=False)
class UniformSegment(Segment):
    """Pairs whose keys and values are uniformly quantised.

    With `block`, keys and values were multiplied by a Hadamard matrix before they were quantised.
    """

    keys: Annotated[UniformRows, part()]
    values: Annotated[UniformRows, part()]
    layout: OfStreams
    channel_scale: Annotated[Tensor | None, per_stream("scales")] = None
    """Factor of each channel of decoded values, float32 `[N, Dv]`."""
    block: int = 0
    """Largest block of the Hadamard matrix, in channels; 0 for no rotation."""

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        keys, values = self.keys.read(rows), self.values.read(rows)
        if self.channel_scale is not None:
            rows = row_numbers(rows, self.layout.total, values.device)
            values = values * self.channel_scale[self.layout.streams_of(rows)].to(values.dtype)
        return rotated(keys, self.block), rotated(values, self.block)

    @property
    def computes_operands(self) -> bool:
        # The tables of a correction by row are computed from counts by chunk.
        return super().computes_operands or any(side.residual is not None for side in (self.keys, self.values))

    def operand(self) -> kernels.Rows:
        keys, values = self.keys.operand(), self.values.operand()
        rotations = [
            hadamard(side.channels, self.device, self.block) if self.block else None for side in (keys, values)
        ]
        key_basis = kernels.Basis(rotation=rotations[0]) if self.block else None
        value_basis = kernels.Basis(self.channel_scale, rotations[1])
        plain = all(tensor is None for tensor in value_basis.tensors())
        return kernels.Rows(keys, values, self.log_weight, key_basis, None if plain else value_basis)


def rotated(side: Tensor, block: int) -> Tensor:
    """Return rows `[R, D]` times a Hadamard matrix in blocks of at most `block` channels, its own inverse; unchanged for 0."""
    if not block:
        return side
    matrix = hadamard(side.shape[1], side.device, block)
    return torch.cat([(rows.detach().float() @ matrix).to(side.dtype) for rows in side.split(BLOCK_ROWS)])


@dataclass
class UniformCodec(Codec):
    """Codec that quantises keys and values uniformly, each with separate bits and blocks."""

    key_bits: int
    value_bits: int
    key_group: tuple[int, int]
    """Rows and channels that share a scale; channels are limited to the head dim."""
    value_group: tuple[int, int]
    """Same as `key_group`, for values."""
    group: int
    """Pairs of a stream that are encoded together."""
    residual: int
    """Newest pairs that stay dense."""
    sinks: int = 0
    """First pairs that stay dense."""
    block: int = 0
    """Largest block of the Hadamard matrix, in channels; 0 for no rotation."""

    @property
    def spread(self) -> Spread:  # type: ignore[override]
        return "tile" if self.key_group[0] > 1 else "length"

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        del sealing
        sides = (segment.keys, self.key_bits, self.key_group), (segment.values, self.value_bits, self.value_group)
        keys, values = (
            UniformRows.encode(rotated(side, self.block), bits, (rows, min(channels, side.shape[1])))
            for side, bits, (rows, channels) in sides
        )
        return UniformSegment(keys, values, segment.layout, block=self.block)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        codes = dim * (self.key_bits + self.value_bits) / 8
        blocks = sum(dim / (rows * min(channels, dim)) for rows, channels in (self.key_group, self.value_group))
        return codes + 2 * parameter_bytes(dtype) * blocks


def parameter_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of a scale or zero for a model of this dtype: 4 for float32, whose values may exceed float16, else 2."""
    return 4 if dtype == torch.float32 else 2
