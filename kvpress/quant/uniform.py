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
from kvpress.cache.storage import Choice, Held, Joint, part, per_group, per_pair, per_stream
from kvpress.quant.hadamard import hadamard
from kvpress.quant.residual import Residual
from kvpress.quant.runs import Runs

WHOLE_HEAD = 2**30
"""As many channels as a head has, where a number of channels is asked for."""


@dataclass(eq=False)
class UniformRows(Held):
    """Quantised rows: `codes [R, D * bits / 8]` uint8, `scale` and `zero [blocks, D / channel_group]`.

    `runs` says which rows share a block: rows that survive an eviction keep the scale they were encoded with. `residual`
    is added to the decoded rows, which have the given `dtype`. Each row of keys may have a factor `row_scale [R]`.
    """

    codes: Annotated[Tensor, per_pair("codes")]
    scale: Annotated[Tensor, per_group("scales", axis="runs")]
    zero: Annotated[Tensor, per_group("scales", axis="runs")]
    runs: Annotated[Runs, part("scales")]
    bits: int
    channel_group: int
    dtype: torch.dtype
    residual: Annotated[Residual | None, part("corrections")] = None
    row_scale: Annotated[Tensor | None, per_pair("scales")] = None

    @classmethod
    def encode(cls, values: Tensor, bits: int, group: tuple[int, int], dtype: torch.dtype | None = None) -> UniformRows:
        """Quantise `values [R, D]` to the nearest of `2**bits` levels between the extremes of each block.

        `dtype` is that of the decoded rows where it is not that of `values`.
        """
        dtype = dtype or values.dtype
        packed = kernels.quantise(values, bits, group, dtype=dtype)
        assert packed.zero is not None  # noqa: S101 - for the type checker
        return cls(packed.codes, packed.scale, packed.zero, Runs(group[0]), bits, group[1], dtype)

    @staticmethod
    def concatenate(parts: Sequence[UniformRows]) -> UniformRows:
        """Put the rows of all parts back to back."""
        return parts[0]._join(parts, Joint([Layout([len(held.codes)]) for held in parts]))

    def take(self, rows: Tensor) -> UniformRows:
        """Return the given rows with only the parameters they need."""
        layout = Layout([len(rows)])
        return self._take(Choice(rows, layout, layout))

    def read(self, rows: Tensor | slice) -> Tensor:
        """Return dense rows `[n, D]` in the dtype that was encoded."""
        rows = row_numbers(rows, len(self.codes), self.codes.device)
        block = self.runs.of(rows)
        codes = kernels.unpack(self.codes[rows], self.bits).unflatten(-1, (-1, self.channel_group)).float()
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
        """As the operators take it."""
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

    `channel_scale [N, Dv]`, float32, multiplies the decoded values of every stream channel by channel. Where `block` is not 0,
    what was quantised are keys and values times the Hadamard matrix of blocks of at most so many channels.
    """

    keys: Annotated[UniformRows, part()]
    values: Annotated[UniformRows, part()]
    layout: OfStreams
    channel_scale: Annotated[Tensor | None, per_stream("scales")] = None
    block: int = 0

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        keys, values = self.keys.read(rows), self.values.read(rows)
        if self.channel_scale is not None:
            rows = row_numbers(rows, self.layout.total, values.device)
            values = values * self.channel_scale[self.layout.streams_of(rows)].to(values.dtype)
        return rotated(keys, self.block), rotated(values, self.block)

    def operand(self) -> kernels.Rows:
        keys, values = self.keys.operand(), self.values.operand()
        turned = [hadamard(side.channels, self.device, self.block) if self.block else None for side in (keys, values)]
        key_basis = kernels.Basis(rotation=turned[0]) if self.block else None
        value_basis = kernels.Basis(self.channel_scale, turned[1])
        plain = all(tensor is None for tensor in value_basis.tensors())
        return kernels.Rows(keys, values, self.log_weight, key_basis, None if plain else value_basis)


def rotated(side: Tensor, block: int) -> Tensor:
    """Rows `[R, D]` times the Hadamard matrix of blocks of at most `block` channels, which is its own inverse; 0 for none."""
    if not block:
        return side
    matrix = hadamard(side.shape[1], side.device, block)
    return torch.cat([(rows.detach().float() @ matrix).to(side.dtype) for rows in side.split(BLOCK_ROWS)])


@dataclass
class UniformCodec(Codec):
    """Keys and values quantised with their own bits and blocks; groups of channels end at the head.

    With `block`, after a rotation by the Hadamard matrix of blocks of at most so many channels.
    """

    key_bits: int
    value_bits: int
    key_group: tuple[int, int]
    value_group: tuple[int, int]
    group: int
    residual: int
    sinks: int = 0
    block: int = 0

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
    """Bytes of a scale or zero for a model of this dtype; values out of the range of float16 take 4."""
    return 4 if dtype == torch.float32 else 2
