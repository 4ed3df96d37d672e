# SPDX-License-Identifier: Apache-2.0
"""Maps from rows of flat storage to shared entries of another tensor, stored as a few bytes per run of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kvpress.cache.layout import spans
from kvpress.cache.storage import Axis, own

UNEVEN = 2**30
"""Size that marks irregular runs, such as one run per stream."""


@dataclass(eq=False)
class Runs(Axis):
    """Map from row `r` to block `r // size`; with `lengths`, int32 [G], the g-th run of rows belongs to block g."""

    size: int
    lengths: Annotated[Tensor | None, own()] = None

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device) -> Runs:
        """Return runs of these lengths, without the empty ones."""
        return cls(UNEVEN, torch.tensor([n for n in lengths if n], dtype=torch.int32, device=device))

    def of_rows(self, total: int) -> Tensor | None:
        """Return the block of each of `total` rows, int32; None if it is `r // size`."""
        if self.lengths is None:
            return None
        return torch.repeat_interleave(self.lengths, output_size=total)

    def of(self, rows: Tensor) -> Tensor:
        """Return the block of each row in `rows`, int64."""
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
            raise ValueError(f"runs do not cover {total} rows")
        return len(self.lengths)

    def join(self, others: Sequence[Runs], totals: Sequence[int], device: torch.device) -> Runs:
        size = self.size
        is_regular = all(
            runs.lengths is None and total % size == 0 for runs, total in zip(others[:-1], totals, strict=False)
        )
        if is_regular and others[-1].lengths is None:
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
    """Number of entries of each row, stored in row order: `counts`, uint8 or int16 [total]."""

    counts: Annotated[Tensor, own()]

    def take(self, rows: Tensor) -> tuple[Counts, Tensor]:
        counts, ends = self.counts.long(), self.counts.cumsum(0)
        return Counts(self.counts[rows]), spans(ends[rows] - counts[rows], counts[rows])

    def entries(self, total: int) -> int:
        if self.counts.shape != (total,) or bool((self.counts < 0).any()):
            raise ValueError(f"counts do not cover {total} rows")
        return int(self.counts.sum())

    def join(self, others: Sequence[Counts], totals: Sequence[int], device: torch.device) -> Counts:
        return Counts(torch.cat([counts.counts for counts in others]))


@dataclass(eq=False)
class RowList(Axis):
    """Rows that have an entry, all others none: `rows`, int32 [E], ascending."""

    rows: Annotated[Tensor, own()]

    def places(self, rows: Tensor) -> Tensor:
        """Return the entry of each of `rows`, int64 [n]; -1 for none."""
        if not len(self.rows):
            return torch.full_like(rows, -1)
        place = torch.searchsorted(self.rows, rows.to(torch.int32)).clamp_max(len(self.rows) - 1)
        return torch.where(self.rows[place] == rows, place, -1)

    def take(self, rows: Tensor) -> tuple[RowList, Tensor]:
        place = self.places(rows)
        has_entry = place >= 0
        return RowList(has_entry.nonzero().flatten().to(torch.int32)), place[has_entry]

    def entries(self, total: int) -> int:
        rows = self.rows
        is_valid = rows.dim() == 1 and rows.dtype == torch.int32 and bool((rows.diff() > 0).all())
        if not is_valid or (len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < total):
            raise ValueError(f"a list of rows does not name some of {total} rows in ascending order")
        return len(rows)

    def join(self, others: Sequence[RowList], totals: Sequence[int], device: torch.device) -> RowList:
        parts, before = [], 0
        for listed, total in zip(others, totals, strict=True):
            parts.append(listed.rows + before)
            before += total
        return RowList(torch.cat(parts))
