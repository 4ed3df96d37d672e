# SPDX-License-Identifier: Apache-2.0
"""Corrections of the quantisation error, stored beside codes: a low-rank product per chunk of rows, and outliers (GEAR).

    row[r] += factor[r] @ basis[chunk[r]]
    row[r, channel[i]] += delta[i]      for first[r] <= i < first[r + 1]

A chunk is a run of rows that were approximated together, so chunk numbers ascend along the rows of a stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.fields import DTYPES, Field

MOST_RANK = 16
MOST_CHANNELS = 256
"""Most channels of a row with outliers, whose channel is stored as a byte."""


@dataclass(frozen=True)
class Correction:
    """Terms added to decoded keys or values: low-rank terms, outliers, or both."""

    factor: Tensor | None = None
    """Low-rank factor of each row, float16 or float32 [R, rank]."""
    basis: Tensor | None = None
    """Low-rank basis of each chunk, [C, rank, D], in the dtype of `factor`."""
    chunk: Tensor | None = None
    """Chunk of each row, int32 [R]."""
    first: Tensor | None = None
    """Index of the first outlier of each row, int32 [R + 1]."""
    channel: Tensor | None = None
    """Channel of each outlier, uint8 [E]; no two of a row are equal."""
    delta: Tensor | None = None
    """Number added to the channel of each outlier, float16 or float32 [E]."""

    def __post_init__(self) -> None:
        tensors = self.tensors()
        for names, term in (("factor, basis and chunk", tensors[:3]), ("first, channel and delta", tensors[3:])):
            count = sum(tensor is not None for tensor in term)
            if count not in (0, len(term)):
                raise ValueError(f"a correction needs {names} together, got {count} of them")

    def tensors(self) -> list[Tensor | None]:
        """Return all fields in order."""
        return [self.factor, self.basis, self.chunk, self.first, self.channel, self.delta]

    @property
    def low_rank(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Factor, basis and chunk; None without low-rank terms."""
        if self.factor is None or self.basis is None or self.chunk is None:
            return None
        return self.factor, self.basis, self.chunk

    @property
    def outliers(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """First, channel and delta; None without outliers."""
        if self.first is None or self.channel is None or self.delta is None:
            return None
        return self.first, self.channel, self.delta

    def dense(self, rows: Tensor, dim: int) -> Tensor:
        """Return the sum of the terms of rows [S], float32 [S, dim]."""
        out = torch.zeros(len(rows), dim, device=rows.device)
        if self.low_rank is not None:
            factor, basis, chunk = self.low_rank
            weight, used = factor[rows].float(), chunk[rows].long()
            for k in range(weight.shape[1]):
                out += weight[:, k, None] * basis[used, k].float()
        if self.outliers is not None:
            first, channel, delta = self.outliers
            owner, entry = _entries(first, rows)
            out[owner, channel[entry].long()] += delta[entry].float()
        return out

    def check(self, name: str, rows: int, channels: int) -> None:
        """Refuse shapes and dtypes that do not match; `check_stored` checks chunk numbers and outliers."""
        if self.low_rank is not None:
            factor, basis, chunk = self.low_rank
            checks.shape(f"{name}.factor", factor, (rows, "rank"), torch.float16, torch.float32)
            rank = factor.shape[1]
            if not 1 <= rank <= MOST_RANK:
                raise ValueError(f"{name}.factor must have a rank in [1, {MOST_RANK}], got {rank}")
            checks.shape(f"{name}.basis", basis, ("C", rank, channels), factor.dtype)
            checks.shape(f"{name}.chunk", chunk, (rows,), torch.int32)
        if self.outliers is not None:
            first, channel, delta = self.outliers
            if channels > MOST_CHANNELS:
                raise ValueError(f"{name} stores outliers of at most {MOST_CHANNELS} channels, got {channels}")
            checks.shape(f"{name}.first", first, (rows + 1,), torch.int32)
            checks.shape(f"{name}.channel", channel, ("E",), torch.uint8)
            checks.shape(f"{name}.delta", delta, tuple(channel.shape), torch.float16, torch.float32)
        for tensor in self.tensors():
            if tensor is not None:
                checks.contiguous(f"tensors of {name}", tensor)

    def check_stored(self, name: str, rows: list[Tensor], channels: int) -> None:
        """Refuse streams whose rows refer to chunks, outliers or channels that do not exist."""
        for n, listed in enumerate(rows):
            if not self._stores(listed, channels):
                raise ValueError(f"stream {n} refers to chunks, outliers or channels outside the {name}")

    def _stores(self, rows: Tensor, channels: int) -> bool:
        if self.low_rank is not None:
            _, basis, chunk = self.low_rank
            if bool(((chunk[rows] < 0) | (chunk[rows] >= len(basis))).any()):
                return False
        if self.outliers is None:
            return True
        first, channel, _ = self.outliers
        begin, end = first[rows], first[rows + 1]
        if bool(((begin < 0) | (end < begin) | (end > len(channel)) | (end - begin > channels)).any()):
            return False
        return not bool((channel[_entries(first, rows)[1]].int() >= channels).any())

    def fields(self) -> tuple[Field, ...]:
        """Return the fields of ``Correction`` in cpu/problem.h."""
        factor_dtype = delta_dtype = rank = bases = outliers = 0
        if self.low_rank is not None:
            factor, basis, _ = self.low_rank
            factor_dtype, rank, bases = DTYPES[factor.dtype], factor.shape[1], basis.shape[0]
        if self.outliers is not None:
            _, channel, delta = self.outliers
            delta_dtype, outliers = DTYPES[delta.dtype], channel.shape[0]
        return (*self.tensors(), factor_dtype, delta_dtype, rank, bases, outliers)


NOTHING = (0,) * 11
"""Fields as those of `Correction.fields`, for rows without a correction."""


def _entries(first: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index in `rows` of the row of each outlier of these rows, and the index of the outlier in storage."""
    begin = first[rows].long()
    counts = first[rows + 1] - begin
    owner = torch.arange(len(rows), device=rows.device).repeat_interleave(counts)
    skipped = begin - (counts.cumsum(0) - counts)
    return owner, torch.arange(len(owner), device=rows.device) + skipped[owner]
