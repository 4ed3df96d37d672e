"""Uniform quantisation with a scale and a zero per block: the storage behind every uniform method.

A value at (row r, channel c) is ``code * scale[r // rows, c // columns] + zero[r // rows, c // columns]`` with
``group = (rows, columns)``: (32, 1) is per channel over 32 tokens, (1, 32) is per token over 32 channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.attention import Logits, Partial
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.quant.base import Codec
from kvpress.quant.packing import pack, unpack


@dataclass
class Packed:
    """Quantised rows: `codes [R, D * bits / 8]` uint8, `scale` and `zero [R / rows, D / columns]`.

    `row_group` int32 [R] replaces `r // rows` once rows were removed: survivors keep the scale they were encoded with.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    bits: int
    group: tuple[int, int]
    dim: int
    dtype: torch.dtype
    row_group: Tensor | None = None

    @classmethod
    def encode(cls, values: Tensor, bits: int, group: tuple[int, int]) -> Packed:
        """Quantise `values [R, D]` to the nearest of `2**bits` levels between the extremes of each block."""
        rows, columns = group
        blocks = values.float().view(-1, rows, values.shape[1] // columns, columns)
        low, high = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
        if not bool(torch.isfinite(low).all() and torch.isfinite(high).all()):
            raise ValueError("cannot quantise keys or values with infinite entries; use a wider model dtype")
        parameters = _parameter_dtype(values.dtype, low, high)
        zero = low.to(parameters)
        scale = ((high - zero.float()) / (2**bits - 1)).clamp_min(0).to(parameters)
        step = scale.float()[:, None, :, None]
        codes = (blocks - zero.float()[:, None, :, None]) / torch.where(step == 0, 1.0, step)
        codes = codes.round_().clamp_(0, 2**bits - 1).to(torch.uint8).view(values.shape)
        return cls(pack(codes, bits), scale, zero, bits, group, values.shape[1], values.dtype)

    def read(self, rows: Tensor | slice) -> Tensor:
        """Return dense rows `[n, D]` in the dtype that was encoded."""
        codes = unpack(self.codes[rows], self.bits)
        block = self._blocks(rows)
        columns = self.group[1]
        codes = codes.unflatten(-1, (-1, columns)).float()
        values = codes * self.scale[block].float()[..., None] + self.zero[block].float()[..., None]
        return values.flatten(-2).to(self.dtype)

    def _blocks(self, rows: Tensor | slice) -> Tensor:
        if self.row_group is not None:
            return self.row_group[rows].long()
        if isinstance(rows, slice):
            rows = torch.arange(*rows.indices(self.codes.shape[0]), device=self.codes.device)
        return rows // self.group[0]

    def take(self, rows: Tensor) -> Packed:
        """Return the given rows with only the scales they need."""
        if self.group[0] == 1:
            return replace(self, codes=self.codes[rows], scale=self.scale[rows], zero=self.zero[rows])
        used, inverse = self._blocks(rows).unique_consecutive(return_inverse=True)
        regular = torch.arange(len(rows), device=rows.device) // self.group[0]
        row_group = None if torch.equal(inverse, regular) else inverse.to(torch.int32)
        return replace(self, codes=self.codes[rows], scale=self.scale[used], zero=self.zero[used], row_group=row_group)

    @staticmethod
    def concatenate(parts: Sequence[Packed]) -> Packed:
        """Put the rows of all parts back to back."""
        row_group = None
        if any(part.row_group is not None for part in parts):
            bases = torch.tensor([0] + [part.scale.shape[0] for part in parts]).cumsum(0).tolist()
            groups = [part._blocks(slice(None)) + base for part, base in zip(parts, bases, strict=False)]
            row_group = torch.cat(groups).to(torch.int32)
        return replace(
            parts[0],
            codes=torch.cat([part.codes for part in parts]),
            scale=torch.cat([part.scale for part in parts]),
            zero=torch.cat([part.zero for part in parts]),
            row_group=row_group,
        )

    def same_settings(self, other: Packed) -> bool:
        """Whether both were encoded alike."""
        return (self.bits, self.group, self.scale.dtype) == (other.bits, other.group, other.scale.dtype)

    def to(self, device: torch.device | str) -> Packed:
        """Return a copy on a device."""
        row_group = None if self.row_group is None else self.row_group.to(device)
        moved = {name: getattr(self, name).to(device) for name in ("codes", "scale", "zero")}
        return replace(self, row_group=row_group, **moved)

    def parameters(self) -> list[Tensor]:
        """Scales, zeros and their index."""
        return [self.scale, self.zero] + ([] if self.row_group is None else [self.row_group])


def _parameter_dtype(dtype: torch.dtype, low: Tensor, high: Tensor) -> torch.dtype:
    if dtype == torch.float32:
        return torch.float32
    # float16 carries more digits than bfloat16; only values out of its range need float32.
    widest = torch.finfo(torch.float16).max / 2
    fits = low.numel() == 0 or float(torch.maximum(low.abs(), high.abs()).max()) < widest
    return torch.float16 if fits else torch.float32


class UniformSegment(Segment):
    """Pairs whose keys and values are uniformly quantised."""

    def __init__(self, keys: Packed, values: Packed, layout: Layout) -> None:
        super().__init__(layout, None, [0] * layout.streams)
        self.keys = keys
        self.values = values

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        return self.keys.read(rows), self.values.read(rows)

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
        return {
            "key_bits": self.keys.bits,
            "value_bits": self.values.bits,
            "key_group": self.keys.group,
            "value_group": self.values.group,
            "softcap": logits.softcap,
            "row_group": self.keys.row_group,
        }

    def _take(self, rows: Tensor, layout: Layout) -> UniformSegment:
        return UniformSegment(self.keys.take(rows), self.values.take(rows), layout)

    @classmethod
    def _concatenate(cls, segments: Sequence[UniformSegment]) -> UniformSegment:
        keys = Packed.concatenate([segment.keys for segment in segments])
        values = Packed.concatenate([segment.values for segment in segments])
        return UniformSegment(keys, values, Layout([keys.codes.shape[0]]))

    def joinable(self, other: Segment) -> bool:
        return (
            isinstance(other, UniformSegment)
            and self.keys.same_settings(other.keys)
            and self.values.same_settings(other.values)
        )

    def storage(self) -> dict[str, list[Tensor]]:
        return {
            "codes": [self.keys.codes, self.values.codes],
            "scales": [*self.keys.parameters(), *self.values.parameters()],
        }

    def _to(self, device: torch.device | str) -> None:
        self.keys, self.values = self.keys.to(device), self.values.to(device)

    @property
    def value_dim(self) -> int:
        return self.values.dim


@dataclass
class UniformCodec(Codec):
    """Keys and values quantised with their own bits and blocks; `skip_layers` stay dense."""

    key_bits: int
    value_bits: int
    key_group: tuple[int, int]
    value_group: tuple[int, int]
    group: int
    residual: int
    skip_layers: tuple[int, ...] = ()

    def encode(self, segment: DenseSegment) -> Segment:
        keys = Packed.encode(segment.keys, self.key_bits, self.key_group)
        rows, columns = self.value_group
        values = Packed.encode(segment.values, self.value_bits, (rows, min(columns, segment.values.shape[-1])))
        return UniformSegment(keys, values, segment.layout)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        parameter = 4 if dtype == torch.float32 else 2
        codes = dim * (self.key_bits + self.value_bits) / 8
        scales = (
            2
            * parameter
            * dim
            * (1 / prod(self.key_group) + 1 / prod((self.value_group[0], min(self.value_group[1], dim))))
        )
        return codes + scales

    def stores(self, layer: int) -> bool:
        return layer not in self.skip_layers
