"""Which rows of flat storage share a block of parameters, as run lengths: 4 bytes per block instead of 4 per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNEVEN = 2**30
"""Size of runs that are not regular, such as one per stream."""


@dataclass
class Runs:
    """Row `r` belongs to block `r // size`; or, where `lengths` int32 [G] is given, the g-th run of rows to block g."""

    size: int
    lengths: Tensor | None = None

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device) -> Runs:
        """Blocks of the given numbers of rows; empty ones are left out."""
        return cls(UNEVEN, torch.tensor([n for n in lengths if n], dtype=torch.int32, device=device))

    def of_rows(self, total: int) -> Tensor | None:
        """Block of each of `total` rows, int32; None where it is `r // size`."""
        if self.lengths is None:
            return None
        blocks = torch.arange(len(self.lengths), dtype=torch.int32, device=self.lengths.device)
        return torch.repeat_interleave(blocks, self.lengths, output_size=total)

    def of(self, rows: Tensor) -> Tensor:
        """Block of each of the given rows, int64."""
        if self.lengths is None:
            return rows // self.size
        return torch.searchsorted(self.lengths.cumsum(0), rows, right=True)

    def take(self, rows: Tensor) -> tuple[Runs, Tensor]:
        """Return the runs of the given rows, and which blocks they still need, int64."""
        if self.size == 1:
            return self, rows
        used, counts = self.of(rows).unique_consecutive(return_counts=True)
        full = counts[:-1] == self.size
        if bool(full.all()) and (len(counts) == 0 or int(counts[-1]) <= self.size < UNEVEN):
            return Runs(self.size), used
        return Runs(self.size, counts.to(torch.int32)), used

    @staticmethod
    def concatenate(parts: Sequence[tuple[Runs, int]], device: torch.device) -> Runs:
        """Put the runs of several parts, each given with its number of rows, back to back."""
        size = parts[0][0].size
        whole = all(runs.lengths is None and total % size == 0 for runs, total in parts[:-1])
        if whole and parts[-1][0].lengths is None:
            return Runs(size)
        return Runs(size, torch.cat([runs._lengths(total, device) for runs, total in parts]))

    def _lengths(self, total: int, device: torch.device) -> Tensor:
        if self.lengths is not None:
            return self.lengths
        lengths = torch.full((-(-total // self.size),), self.size, dtype=torch.int32, device=device)
        if total % self.size:
            lengths[-1] = total % self.size
        return lengths

    def to(self, device: torch.device | str) -> Runs:
        """Return a copy on a device."""
        return Runs(self.size, None if self.lengths is None else self.lengths.to(device))

    def tensors(self) -> list[Tensor]:
        """Tensors held."""
        return [] if self.lengths is None else [self.lengths]
