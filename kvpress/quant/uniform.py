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
from kvpress.cache.held import Choice, Held, Joint, part, per_group, per_pair, per_stream
from kvpress.cache.layout import Layout, row_numbers
from kvpress.cache.segment import DenseSegment, OfStreams, Segment
from kvpress.quant.residual import Residual
from kvpress.quant.runs import Runs


@dataclass(eq=False)
class UniformRows(Held):
    """Quantised rows: `codes [R, D * bits / 8]` uint8, `scale` and `zero [blocks, D / channel_group]`.

    `runs` says which rows share a block: rows that survive an eviction keep the scale they were encoded with. `residual`
    is added to the decoded rows, which have the given `dtype`.
    """

    codes: Annotated[Tensor, per_pair("codes")]
    scale: Annotated[Tensor, per_group("scales", axis="runs")]
    zero: Annotated[Tensor, per_group("scales", axis="runs")]
    runs: Annotated[Runs, part("scales")]
    bits: int
    channel_group: int
    dtype: torch.dtype
    residual: Annotated[Residual | None, part("corrections")] = None

    @classmethod
    def encode(cls, values: Tensor, bits: int, group: tuple[int, int], dtype: torch.dtype | None = None) -> UniformRows:
        """Quantise `values [R, D]` to the nearest of `2**bits` levels between the extremes of each block.

        `dtype` is that of the decoded rows where it is not that of `values`.
        """
        dtype = dtype or values.dtype
        packed = kernels.quantise(values, bits, group, dtype=dtype)
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
        row_group = self.runs.of_rows(total) if self.runs.size > 1 else None
        return kernels.Packed(self.codes, self.scale, self.zero, self.bits, self.group, row_group, correction)


@dataclass(eq=False, repr=False)
class UniformSegment(Segment):
    """Pairs whose keys and values are uniformly quantised.

    `channel_scale [N, Dv]`, float32, multiplies the decoded values of every stream channel by channel.
    """

    keys: Annotated[UniformRows, part()]
    values: Annotated[UniformRows, part()]
    layout: OfStreams
    channel_scale: Annotated[Tensor | None, per_stream("scales")] = None

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        values = self.values.read(rows)
        if self.channel_scale is not None:
            rows = row_numbers(rows, self.layout.total, values.device)
            values = values * self.channel_scale[self.layout.streams_of(rows)].to(values.dtype)
        return self.keys.read(rows), values

    def operand(self) -> kernels.Rows:
        basis = None if self.channel_scale is None else kernels.Basis(scale=self.channel_scale)
        return kernels.Rows(self.keys.operand(), self.values.operand(), log_weight=self.log_weight, value_basis=basis)


@dataclass
class UniformCodec(Codec):
    """Keys and values quantised with their own bits and blocks."""

    key_bits: int
    value_bits: int
    key_group: tuple[int, int]
    value_group: tuple[int, int]
    group: int
    residual: int
    sinks: int = 0

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        del sealing
        keys = UniformRows.encode(segment.keys, self.key_bits, self.key_group)
        rows, channels = self.value_group
        values = UniformRows.encode(segment.values, self.value_bits, (rows, min(channels, segment.values.shape[-1])))
        return UniformSegment(keys, values, segment.layout)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        key_rows, key_channels = self.key_group
        value_rows, value_channels = self.value_group[0], min(self.value_group[1], dim)
        codes = dim * (self.key_bits + self.value_bits) / 8
        blocks = dim / (key_rows * key_channels) + dim / (value_rows * value_channels)
        return codes + 2 * parameter_bytes(dtype) * blocks


def parameter_bytes(dtype: torch.dtype) -> int:
    """Bytes of a scale or zero for a model of this dtype; values out of the range of float16 take 4."""
    return 4 if dtype == torch.float32 else 2
