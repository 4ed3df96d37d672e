"""Uniform quantisation with a scale and a zero per block: the storage behind every uniform method.

A value at row r, channel c is ``code * scale[b, c // columns] + zero[b, c // columns]``, where b is the block of row r. With
``group = (rows, columns)`` blocks are runs of `rows` rows: (32, 1) is per channel over 32 tokens, (1, 32) is per token
over 32 channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.attention import Logits, Partial
from kvpress.cache.layout import Layout, row_numbers
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.cache.store import Sealing
from kvpress.kernels.packed import unpack
from kvpress.kernels.quantise import quantise
from kvpress.quant.base import Codec
from kvpress.quant.residual import Residual
from kvpress.quant.runs import Runs


@dataclass
class Packed:
    """Quantised rows: `codes [R, D * bits / 8]` uint8, `scale` and `zero [blocks, D / columns]`.

    `runs` says which rows share a block: rows that survive an eviction keep the scale they were encoded with. `residual`
    is added to the decoded rows.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    columns: int
    runs: Runs
    dim: int
    dtype: torch.dtype
    residual: Residual | None = None

    @classmethod
    def encode(cls, values: Tensor, bits: int, group: tuple[int, int], dtype: torch.dtype | None = None) -> Packed:
        """Quantise `values [R, D]` to the nearest of `2**bits` levels between the extremes of each block.

        `dtype` is that of the decoded rows where it is not that of `values`.
        """
        dtype = dtype or values.dtype
        codes, scale, zero = quantise(values, bits, group, dtype=dtype)
        return cls(codes, scale, zero, bits, group[1], Runs(group[0]), values.shape[1], dtype)

    def read(self, rows: Tensor | slice) -> Tensor:
        """Return dense rows `[n, D]` in the dtype that was encoded."""
        rows = row_numbers(rows, len(self.codes), self.codes.device)
        block = self.runs.of(rows)
        codes = unpack(self.codes[rows], self.bits).unflatten(-1, (-1, self.columns)).float()
        values = (codes * self.scale[block].float()[..., None] + self.zero[block].float()[..., None]).flatten(-2)
        if self.residual is not None:
            values += self.residual.operand(len(self.codes)).dense(rows, self.dim)
        return values.to(self.dtype)

    def take(self, rows: Tensor) -> Packed:
        """Return the given rows with only the parameters they need."""
        runs, used = self.runs.take(rows)
        residual = None if self.residual is None else self.residual.take(rows)
        codes, scale, zero = self.codes[rows], self.scale[used], self.zero[used]
        return replace(self, codes=codes, scale=scale, zero=zero, runs=runs, residual=residual)

    @staticmethod
    def concatenate(parts: Sequence[Packed]) -> Packed:
        """Put the rows of all parts back to back."""
        device = parts[0].codes.device
        residuals = [(part.residual, len(part.codes)) for part in parts if part.residual is not None]
        return replace(
            parts[0],
            codes=torch.cat([part.codes for part in parts]),
            scale=torch.cat([part.scale for part in parts]),
            zero=torch.cat([part.zero for part in parts]),
            runs=Runs.concatenate([(part.runs, len(part.codes)) for part in parts], device),
            residual=Residual.concatenate(residuals, device) if residuals else None,
        )

    def same_settings(self, other: Packed) -> bool:
        """Whether both were encoded alike."""
        if self.residual is not None and other.residual is not None:
            residuals = self.residual.same_settings(other.residual)
        else:
            residuals = self.residual is other.residual
        return residuals and self._settings() == other._settings()

    def _settings(self) -> tuple[Any, ...]:
        return self.bits, self.columns, self.runs.size, self.scale.dtype

    def to(self, device: torch.device | str) -> Packed:
        """Return a copy on a device."""
        residual = None if self.residual is None else self.residual.to(device)
        moved = {name: getattr(self, name).to(device) for name in ("codes", "scale", "zero", "runs")}
        return replace(self, residual=residual, **moved)

    @property
    def group(self) -> tuple[int, int]:
        """Rows and channels that share a scale."""
        return self.runs.size, self.columns

    def parameters(self) -> list[Tensor]:
        """Scales, zeros and the runs that share them."""
        return [self.scale, self.zero, *self.runs.tensors()]


class UniformSegment(Segment):
    """Pairs whose keys and values are uniformly quantised.

    `column [N, Dv]`, float32, multiplies the decoded values of every stream channel by channel.
    """

    def __init__(self, keys: Packed, values: Packed, layout: Layout, column: Tensor | None = None) -> None:
        super().__init__(layout, None, [0] * layout.streams)
        self.keys = keys
        self.values = values
        self.column = column

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        values = self.values.read(rows)
        if self.column is not None:
            rows = row_numbers(rows, self.layout.total, self.device)
            values = values * self.column[self.layout.streams_of(rows)].to(values.dtype)
        return self.keys.read(rows), values

    def attend(self, queries: Tensor, logits: Logits, hidden: Tensor | None = None) -> Partial:
        if hidden is None and kernels.serves(queries, self.keys.codes):
            at, lengths = self.layout.on(self.device)
            return kernels.uniform_decode(
                queries, *self._operands(), at, lengths, logits.scale, **self._settings(logits)
            )
        return super().attend(queries, logits, hidden)

    def attend_rows(self, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor) -> Partial:
        if kernels.serves(queries, self.keys.codes):
            return kernels.uniform_select(
                queries, *self._operands(), rows, counts, logits.scale, **self._settings(logits)
            )
        return super().attend_rows(queries, logits, rows, counts)

    def _operands(self) -> tuple[Tensor, ...]:
        keys, values = self.keys, self.values
        return keys.codes, keys.scale, keys.zero, values.codes, values.scale, values.zero

    def _settings(self, logits: Logits) -> dict[str, Any]:
        total = self.layout.total
        key_residual, value_residual = self.keys.residual, self.values.residual
        return {
            "key_bits": self.keys.bits,
            "value_bits": self.values.bits,
            "key_group": self.keys.group,
            "value_group": self.values.group,
            "softcap": logits.softcap,
            "row_group": self.keys.runs.of_rows(total),
            "key_correction": None if key_residual is None else key_residual.operand(total),
            "value_correction": None if value_residual is None else value_residual.operand(total),
            "value_column": self.column,
        }

    def _take(self, rows: Tensor, layout: Layout) -> UniformSegment:
        column = None if self.column is None else self.column[self._sources(rows, layout)]
        return UniformSegment(self.keys.take(rows), self.values.take(rows), layout, column)

    @classmethod
    def _concatenate(cls, segments: Sequence[UniformSegment]) -> UniformSegment:
        keys = Packed.concatenate([segment.keys for segment in segments])
        values = Packed.concatenate([segment.values for segment in segments])
        columns = [segment.column for segment in segments if segment.column is not None]
        layout = Layout(length for segment in segments for length in segment.layout.lengths)
        return UniformSegment(keys, values, layout, torch.cat(columns) if columns else None)

    def joinable(self, other: Segment) -> bool:
        return (
            isinstance(other, UniformSegment)
            and self.keys.same_settings(other.keys)
            and self.values.same_settings(other.values)
            and self._same_columns(other)
        )

    def _same_columns(self, other: UniformSegment) -> bool:
        if self.column is None or other.column is None:
            return self.column is other.column
        lengths = zip(self.layout.lengths, other.layout.lengths, strict=True)
        shared = [n for n, both in enumerate(lengths) if all(both)]
        return torch.equal(self.column[shared], other.column[shared])

    def storage(self) -> dict[str, list[Tensor]]:
        sides = (self.keys, self.values)
        corrections = [tensor for side in sides if side.residual for tensor in side.residual.tensors()]
        held = {
            "codes": [side.codes for side in sides],
            "scales": [tensor for side in sides for tensor in side.parameters()],
        }
        if self.column is not None:
            held["scales"].append(self.column)
        return held | ({"corrections": corrections} if corrections else {})

    def _to(self, device: torch.device | str) -> None:
        self.keys, self.values = self.keys.to(device), self.values.to(device)
        self.column = None if self.column is None else self.column.to(device)

    @property
    def value_dim(self) -> int:
        return self.values.dim


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
        keys = Packed.encode(segment.keys, self.key_bits, self.key_group)
        rows, columns = self.value_group
        values = Packed.encode(segment.values, self.value_bits, (rows, min(columns, segment.values.shape[-1])))
        return UniformSegment(keys, values, segment.layout)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        key_rows, key_columns = self.key_group
        value_rows, value_columns = self.value_group[0], min(self.value_group[1], dim)
        codes = dim * (self.key_bits + self.value_bits) / 8
        blocks = dim / (key_rows * key_columns) + dim / (value_rows * value_columns)
        return codes + 2 * parameter_bytes(dtype) * blocks


def parameter_bytes(dtype: torch.dtype) -> int:
    """Bytes of a scale or zero for a model of this dtype; values out of the range of float16 take 4."""
    return 4 if dtype == torch.float32 else 2
