"""What uniform codes leave over: a low-rank part and a few exact outliers, added back inside attention (GEAR)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpress.kernels.correction import Correction
from kvpress.quant.runs import Runs


@dataclass
class Residual:
    """Row `r` of a side gains `factor[r] @ basis[chunk of r]`, and `delta` at the listed channels.

    `factor [R, k]` and `basis [C, k, D]` hold the low-rank part of C chunks; `outliers uint8 [R]` counts the entries of
    every row in `channel uint8 [E]` and `delta [E]`, both in row order. Either part may be absent.
    """

    chunks: Runs
    factor: Tensor | None = None
    basis: Tensor | None = None
    outliers: Tensor | None = None
    channel: Tensor | None = None
    delta: Tensor | None = None

    def operand(self, total: int) -> Correction:
        """As the operators take it; indexes that are held in short form are spread out."""
        chunk = first = None
        if self.factor is not None:
            chunk = self.chunks.of_rows(total)
            if chunk is None:
                chunk = torch.arange(total, dtype=torch.int32, device=self.factor.device) // self.chunks.size
        if self.outliers is not None:
            first = torch.nn.functional.pad(self.outliers.cumsum(0, dtype=torch.int32), (1, 0))
        return Correction(self.factor, self.basis, chunk, first, self.channel, self.delta)

    def take(self, rows: Tensor) -> Residual:
        """Return the residual of the given rows with only the chunks they need."""
        chunks, used = self.chunks.take(rows)
        taken = replace(self, chunks=chunks)
        if self.factor is not None and self.basis is not None:
            taken.factor, taken.basis = self.factor[rows], self.basis[used]
        if self.outliers is not None and self.channel is not None and self.delta is not None:
            counts = self.outliers.long()
            entries = spans(counts.cumsum(0)[rows] - counts[rows], counts[rows])
            taken.outliers, taken.channel, taken.delta = self.outliers[rows], self.channel[entries], self.delta[entries]
        return taken

    @staticmethod
    def concatenate(parts: Sequence[tuple[Residual, int]], device: torch.device) -> Residual:
        """Put the rows of several parts, each given with its number of rows, back to back."""
        chunks = Runs.concatenate([(part.chunks, total) for part, total in parts], device)
        joined: dict[str, Tensor | None] = {}
        for name in ("factor", "basis", "outliers", "channel", "delta"):
            tensors = [getattr(part, name) for part, _ in parts]
            joined[name] = None if tensors[0] is None else torch.cat(tensors)
        return Residual(chunks, **joined)

    def same_settings(self, other: Residual) -> bool:
        """Whether both have the same parts and rank."""
        rank = None if self.factor is None else self.factor.shape[1]
        other_rank = None if other.factor is None else other.factor.shape[1]
        return rank == other_rank and (self.outliers is None) == (other.outliers is None)

    def to(self, device: torch.device | str) -> Residual:
        """Return a copy on a device."""
        moved = {name: None if t is None else t.to(device) for name, t in vars(self).items() if name != "chunks"}
        return Residual(self.chunks.to(device), **moved)

    def tensors(self) -> list[Tensor]:
        """Tensors held."""
        held = (self.factor, self.basis, self.outliers, self.channel, self.delta)
        return [*self.chunks.tensors(), *(tensor for tensor in held if tensor is not None)]


def spans(first: Tensor, counts: Tensor) -> Tensor:
    """Return `first[i], ..., first[i] + counts[i] - 1` for every i, one after another."""
    ends = counts.cumsum(0)
    within = torch.arange(int(ends[-1]) if len(ends) else 0, device=first.device)
    return torch.repeat_interleave(first - ends + counts, counts) + within
