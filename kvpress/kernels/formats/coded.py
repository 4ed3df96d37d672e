# SPDX-License-Identifier: Apache-2.0
"""Codebook-quantised rows, a code per c neighbouring channels: coupled quantisation, scalar codebooks, TurboQuant.

With E entries per codebook ("book"), and codes of b bits packed as in `kvpress.kernels.formats.packing`:

    codes uint8 [R, D / c * b / 8]      book [books, D / c or 1, E, c] float16 or float32, E <= 2 ** b

    row[r, g * c + j] = row_scale[r] * book[stream % books, g, unpack(codes[r])[g], j]

A book of one group serves all groups. A code past the end of its book stands for the last entry. Outliers are added last,
before the rotary embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.correction import NOTHING, Correction
from kvpress.kernels.formats.fields import DTYPES, Field
from kvpress.kernels.formats.packing import CODE_BITS, row_step, unpack
from kvpress.kernels.formats.rotary import Rotary


@dataclass(frozen=True)
class Coded:
    """Keys or values of a cache with codebooks."""

    codes: Tensor
    """Packed codes, uint8 [R, D / c * bits / 8]; rows may be strided, elements of a row may not."""
    book: Tensor
    """Centroids [books, D / c or 1, E, c], float16 or float32; stream n reads book ``n % books``."""
    bits: int
    """Bits per code: 1, 2, 3, 4, 8, 9, 10 or 12."""
    row_scale: Tensor | None = None
    """Factor of each row, float32, bfloat16 or float16 [R]."""
    rotary: Rotary | None = None
    """Rotary embedding applied to keys when they are read; None for values."""
    correction: Correction | None = None
    """Outliers added to the decoded rows; no low-rank terms."""

    name: ClassVar[str] = "coded"

    @property
    def storage(self) -> Tensor:
        """Tensor of R rows; its device runs the kernels."""
        return self.codes

    @property
    def groups(self) -> int:
        """Codes of a row."""
        return self.book.shape[1] if self.book.shape[1] > 1 else self.codes.shape[1] * 8 // self.bits

    @property
    def channels(self) -> int:
        """Channels D of a decoded row."""
        return self.groups * self.book.shape[3]

    def read(self, rows: Tensor, stream: int = 0) -> Tensor:
        """Decode the rows with numbers [S] of a stream: float32 [S, D]."""
        codes = unpack(self.codes[rows], self.bits).long().clamp_max(self.book.shape[2] - 1)
        book = self.book[stream % self.book.shape[0]].expand(codes.shape[1], -1, -1)
        values = book[torch.arange(codes.shape[1], device=codes.device), codes].float().flatten(1)
        if self.row_scale is not None:
            values = values * self.row_scale[rows, None].float()
        if self.correction is not None:
            values = values + self.correction.dense(rows, self.channels)
        return values if self.rotary is None else self.rotary.rotate(values, self.rotary.at(stream, rows))

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors."""
        rotary = () if self.rotary is None else self.rotary.tensors()
        correction = () if self.correction is None else self.correction.tensors()
        return self.codes, self.book, self.row_scale, *rotary, *correction

    def check(self, name: str, rows: int, channels: int | None = None) -> None:
        """Refuse codes, books and scales that do not match; `channels` is the number of the queries' channels, None for any."""
        book, bits = self.book, self.bits
        if bits not in CODE_BITS:
            raise ValueError(f"{name}.bits must be one of {CODE_BITS}, got {bits}")
        checks.shape(f"{name}.book", book, ("books", "groups", "E", "c"), torch.float16, torch.float32)
        books, groups, entries, coupled = book.shape
        if books * groups * coupled < 1:
            raise ValueError(f"{name}.book must hold at least one book and channel, got {list(book.shape)}")
        if not 1 <= entries <= 2**bits:
            raise ValueError(f"{name}.book must have 1 to {2**bits} entries for {bits} bits, got {entries}")
        checks.contiguous(f"{name}.book", book)
        if groups == 1:
            groups = self.codes.shape[-1] * 8 // bits if channels is None else channels // coupled
        if groups % row_step(bits):
            raise ValueError(f"{name} must have a multiple of {row_step(bits)} groups for {bits} bits, got {groups}")
        if channels is not None and groups * coupled != channels:
            raise ValueError(f"{name}.book must hold {channels} channels like q, got {list(book.shape)}")
        checks.shape(f"{name}.codes", self.codes, (rows, groups * bits // 8), torch.uint8)
        checks.rows_layout(f"{name}.codes", self.codes)
        if self.row_scale is not None:
            checks.shape(f"{name}.row_scale", self.row_scale, (rows,), *checks.FLOATS)
            checks.contiguous(f"{name}.row_scale", self.row_scale)
        if self.rotary is not None:
            self.rotary.check(f"{name}.rotary", rows, groups * coupled)
        if self.correction is not None:
            if self.correction.low_rank is not None:
                raise ValueError(f"{name}.correction must have outliers only, not a factor and a basis")
            self.correction.check(f"{name}.correction", rows, groups * coupled)

    def check_stored(self, name: str, listed: list[Tensor], streams: list[int]) -> None:
        """Refuse streams whose rows have positions without angles, or outliers that are not stored."""
        if self.correction is not None:
            self.correction.check_stored(f"{name}.correction", listed, self.channels)
        if self.rotary is not None:
            self.rotary.check_stored(listed, streams)

    def fields(self) -> tuple[Field, ...]:
        """Return the fields of ``Coded`` in cpu/coded_problem.h."""
        books, book_groups, entries, coupled = self.book.shape
        half = int(self.book.dtype == torch.float16)
        scale = 0 if self.row_scale is None else DTYPES[self.row_scale.dtype]
        sizes = (self.codes.stride(0), self.bits, half, scale, books, self.groups, book_groups, entries, coupled)
        correction = NOTHING if self.correction is None else self.correction.fields()
        return (self.codes, self.book, self.row_scale, *sizes, *correction)
