# SPDX-License-Identifier: Apache-2.0
"""Uniformly quantised rows: packed integer codes with a scale and a zero per group.

Codes are laid out as in `kvpress.kernels.formats.packing`. Scale and zero belong to groups of (gr, gc) rows and channels,
usually (32, 1) for keys and (1, 32) for values:

    value[r, c] = code[r, c] * scale[r // gr, c // gc] + zero[r // gr, c // gc]      scale, zero [ceil(R / gr), D / gc]

With ``group_lengths``, group g has ``group_lengths[g]`` rows instead of gr: rows that survive an eviction keep the group that
they were encoded with. With ``levels``, a code stands for its level instead of its number. With ``row_scale``, decoded keys are
multiplied by it. Without ``zero``, values are even steps around one code, so that kernels read a scale only:

    value[r, c] = (code[r, c] - zero_point) * scale[r // gr, c // gc]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.correction import NOTHING, Correction
from kvpress.kernels.formats.fields import DTYPES, Field
from kvpress.kernels.formats.packing import BITS, row_step, unpack

NARROW = {torch.float8_e4m3fn: 3, torch.float8_e8m0fnu: 4}
"""Number of each dtype of eight-bit scales, as enumerated in ``cpu/problem.h``."""


@dataclass(frozen=True)
class Packed:
    """Keys or values of a quantised cache."""

    codes: Tensor
    """Packed codes, uint8 [R, D * bits / 8]."""
    scale: Tensor
    """Scales [ceil(R / gr), D / gc], float16 or float32; without `zero` also float8_e4m3fn or float8_e8m0fnu, finite."""
    zero: Tensor | None
    """Value of code 0 in each group, shape and dtype of `scale`; None where `zero_point` serves all groups."""
    bits: int
    """Bits per code: 1, 2, 3, 4 or 8."""
    group: tuple[int, int]
    """Rows and channels (gr, gc) that share a scale."""
    group_lengths: Tensor | None = None
    """Rows of each group in order, int32 [groups], with the sum R; None for gr rows each."""
    correction: Correction | None = None
    """Terms added to the decoded rows; None with `row_scale`."""
    levels: Tensor | None = None
    """Value that each code stands for, float16 [2 ** bits]; None for the number of the code."""
    row_scale: Tensor | None = None
    """Factor of each row, float32, bfloat16 or float16 [R]; for keys only."""
    zero_point: float = 0.0
    """Code that stands for 0, a multiple of 0.5; 0 with `zero` or `levels`."""

    name: ClassVar[str] = "packed"

    @property
    def storage(self) -> Tensor:
        """Tensor of R rows; its device runs the kernels."""
        return self.codes

    @property
    def channels(self) -> int:
        """Channels D of a decoded row."""
        return self.scale.shape[1] * self.group[1]

    def read(self, rows: Tensor, stream: int = 0) -> Tensor:
        """Decode the rows with numbers [S], corrections included: float32 [S, D]."""
        if self.group_lengths is None:
            group = rows // self.group[0]
        else:
            group = torch.searchsorted(self.group_lengths.cumsum(0), rows, right=True)
        codes = unpack(self.codes[rows], self.bits)
        values = codes.float() if self.levels is None else self.levels.float()[codes.long()]
        values = (values - self.zero_point) * self._spread(self.scale, group)
        if self.zero is not None:
            values = values + self._spread(self.zero, group)
        if self.row_scale is not None:
            values = values * self.row_scale[rows, None].float()
        return values if self.correction is None else values + self.correction.dense(rows, self.channels)

    def _spread(self, parameters: Tensor, group: Tensor) -> Tensor:
        """Return the parameters of row groups [S] for every channel, float32 [S, D]."""
        return parameters[group].float().repeat_interleave(self.group[1], dim=-1)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors."""
        terms = () if self.correction is None else self.correction.tensors()
        return (self.codes, self.scale, self.zero, self.group_lengths, self.levels, self.row_scale, *terms)

    def check(self, name: str, rows: int, channels: int | None = None) -> None:
        """Refuse codes, scales and zeros that do not match; `channels` is the number of the queries' channels, None for any."""
        if self.bits not in BITS:
            raise ValueError(f"{name}.bits must be one of {BITS}, got {self.bits}")
        if channels is None:
            channels = self.codes.shape[-1] * 8 // self.bits
        if channels % row_step(self.bits):
            step = row_step(self.bits)
            raise ValueError(f"{name} must have a multiple of {step} channels for {self.bits} bits, got {channels}")
        group_rows, group_channels = self.group
        if group_rows < 1 or group_channels < 1 or channels % group_channels:
            raise ValueError(
                f"{name}.group must be (rows >= 1, a divisor of {channels} channels), got {tuple(self.group)}"
            )
        checks.shape(f"{name}.codes", self.codes, (rows, channels * self.bits // 8), torch.uint8)
        groups = -(-rows // group_rows)
        if self.group_lengths is not None:
            checks.shape(f"{name}.group_lengths", self.group_lengths, ("groups",), torch.int32)
            checks.contiguous(f"{name}.group_lengths", self.group_lengths)
            if group_rows == 1:
                raise ValueError(f"{name}.group_lengths must be None where every row is a group of its own")
            groups = len(self.group_lengths)
        wide = (torch.float16, torch.float32)
        scales = wide if self.zero is not None else (*wide, *NARROW)
        checks.shape(f"{name}.scale", self.scale, (groups, channels // group_channels), *scales)
        checks.contiguous(f"{name}.codes", self.codes)
        checks.contiguous(f"{name}.scale", self.scale)
        self._check_zero_point(name)
        if self.zero is not None:
            checks.shape(f"{name}.zero", self.zero, tuple(self.scale.shape), self.scale.dtype)
            checks.contiguous(f"{name}.zero", self.zero)
        if self.levels is not None:
            checks.shape(f"{name}.levels", self.levels, (2**self.bits,), torch.float16)
            checks.contiguous(f"{name}.levels", self.levels)
        if self.row_scale is not None:
            checks.shape(f"{name}.row_scale", self.row_scale, (rows,), *checks.FLOATS)
            checks.contiguous(f"{name}.row_scale", self.row_scale)
        if self.correction is not None:
            if self.row_scale is not None:
                raise ValueError(f"{name} must have a correction or a row_scale, not both")
            self.correction.check(f"{name}.correction", rows, channels)

    def _check_zero_point(self, name: str) -> None:
        """Refuse a zero point outside the range of codes, and one beside zeros or levels."""
        point, limit = self.zero_point, 2**self.bits - 1
        if not (0 <= point <= limit and float(2 * point).is_integer()):
            raise ValueError(f"{name}.zero_point must be a multiple of 0.5 in [0, {limit}], got {point}")
        if point and (self.zero is not None or self.levels is not None):
            raise ValueError(f"{name}.zero_point must be 0 with zeros or levels, got {point}")

    def check_stored(self, name: str, listed: list[Tensor], streams: list[int]) -> None:
        """Refuse streams whose rows refer to groups or corrections that are not stored."""
        lengths = self.group_lengths
        for n, rows in enumerate([] if lengths is None else listed):
            if len(rows) and int(rows.max()) >= int(lengths.sum()):  # type: ignore[union-attr]
                raise ValueError(f"stream {n} refers to rows outside the {self.scale.shape[0]} groups of {name}")
        if self.correction is not None:
            self.correction.check_stored(f"{name}.correction", listed, self.channels)

    def fields(self) -> tuple[Field, ...]:
        """Return the fields of ``Rows`` in cpu/problem.h."""
        scale, (group_rows, group_channels) = self.scale, self.group
        shape = (scale.shape[1] * group_channels, self.codes.shape[1], (DTYPES | NARROW)[scale.dtype], self.bits)
        row_dtype = 0 if self.row_scale is None else DTYPES[self.row_scale.dtype]
        correction = NOTHING if self.correction is None else self.correction.fields()
        tensors = (self.codes, scale, self.zero, self.group_lengths)
        groups = (group_rows, group_channels, scale.shape[0])
        decoding = (self.levels, self.row_scale, row_dtype, float(self.zero_point))
        return (*tensors, *shape, *groups, *decoding, *correction)
