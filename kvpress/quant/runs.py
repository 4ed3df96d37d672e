# SPDX-License-Identifier: Apache-2.0
"""Which rows of flat storage share entries of another tensor, as numbers of rows: a few bytes per run instead of per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kvpress.cache.layout import spans
from kvpress.cache.storage import Axis, own

UNEVEN = 2**30
"""Size of runs that are not regular, such as one per stream."""


@dataclass(eq=False)
class Runs(Axis):
    """Row `r` belongs to block `r // size`; or, where `lengths` int32 [G] is given, the g-th run of rows to block g."""

    size: int
    lengths: Annotated[Tensor | None, own()] = None

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device) -> Runs:
        """Blocks of the given numbers of rows; empty ones are left out."""
        return cls(UNEVEN, torch.tensor([n for n in lengths if n], dtype=torch.int32, device=device))

    def of_rows(self, total: int) -> Tensor | None:
        """Block of each of `total` rows, int32; None where it is `r // size`."""
        if self.lengths is None:
            return None
        return torch.repeat_interleave(self.lengths, output_size=total)

    def of(self, rows: Tensor) -> Tensor:
        """Block of each of the given rows, int64."""
        if self.lengths is None:
            return rows // self.size
        return torch.searchsorted(self.lengths.cumsum(0), rows, right=True)

    def take(self, rows: Tensor) -> tuple[Runs, Tensor]:
        if self.size == 1:
            return self, rows
        used, counts = self.of(rows).unique_consecutive(return_counts=True)
        full = counts[:-1] == self.size
        if bool(full.all()) and (len(counts) == 0 or int(counts[-1]) <= self.size < UNEVEN):
            return Runs(self.size), used
        return Runs(self.size, counts.to(torch.int32)), used

    def entries(self, total: int) -> int:
        if self.lengths is None:
            if self.size < 1:
                raise ValueError(f"runs have {self.size} rows")
            return -(-total // self.size)
        if self.lengths.dim() != 1 or int(self.lengths.sum()) != total or bool((self.lengths < 0).any()):
            raise ValueError(f"runs are of another number of rows than {total}")
        return len(self.lengths)

    def join(self, others: Sequence[Runs], totals: Sequence[int], device: torch.device) -> Runs:
        size = self.size
        whole = all(
            runs.lengths is None and total % size == 0 for runs, total in zip(others[:-1], totals, strict=False)
        )
        if whole and others[-1].lengths is None:
            return Runs(size)
        parts = zip(others, totals, strict=True)
        return Runs(size, torch.cat([runs._lengths(total, device) for runs, total in parts]))

    def _lengths(self, total: int, device: torch.device) -> Tensor:
        if self.lengths is not None:
            return self.lengths
        lengths = torch.full((-(-total // self.size),), self.size, dtype=torch.int32, device=device)
        if total % self.size:
            lengths[-1] = total % self.size
        return lengths


@dataclass(eq=False)
class Counts(Axis):
    """Row `r` has `counts[r]` entries of its own, in row order; uint8 or int16 [total]."""

    counts: Annotated[Tensor, own()]

    def take(self, rows: Tensor) -> tuple[Counts, Tensor]:
        counts, ends = self.counts.long(), self.counts.cumsum(0)
        return Counts(self.counts[rows]), spans(ends[rows] - counts[rows], counts[rows])

    def entries(self, total: int) -> int:
        if self.counts.shape != (total,) or bool((self.counts < 0).any()):
            raise ValueError(f"counts are of another number of rows than {total}")
        return int(self.counts.sum())

    def join(self, others: Sequence[Counts], totals: Sequence[int], device: torch.device) -> Counts:
        return Counts(torch.cat([other.counts for other in others]))
