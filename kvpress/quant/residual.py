# SPDX-License-Identifier: Apache-2.0
"""What uniform codes leave over: a low-rank part and a few exact outliers, added back inside attention (GEAR)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kvpress.cache.storage import Held, part, per_group, per_pair
from kvpress.kernels import Correction
from kvpress.quant.runs import Counts, Runs


@dataclass(eq=False)
class Residual(Held):
    """Row `r` of a side gains `factor[r] @ basis[chunk of r]`, and `delta` at the listed channels.

    `factor [R, k]` and `basis [C, k, D]` hold the low-rank part of C chunks; `outliers` counts the entries of every row in
    `channel uint8 [E]` and `delta [E]`, both in row order. Either part may be absent.
    """

    chunks: Annotated[Runs, part()]
    factor: Annotated[Tensor | None, per_pair()] = None
    basis: Annotated[Tensor | None, per_group(axis="chunks")] = None
    outliers: Annotated[Counts | None, part()] = None
    channel: Annotated[Tensor | None, per_group(axis="outliers")] = None
    delta: Annotated[Tensor | None, per_group(axis="outliers")] = None

    def operand(self, total: int) -> Correction:
        """As the operators take it; indexes that are held in short form are spread out."""
        chunk = first = None
        if self.factor is not None:
            chunk = self.chunks.of_rows(total)
            if chunk is None:
                chunk = torch.arange(total, dtype=torch.int32, device=self.factor.device) // self.chunks.size
        if self.outliers is not None:
            first = torch.nn.functional.pad(self.outliers.counts.cumsum(0, dtype=torch.int32), (1, 0))
        return Correction(self.factor, self.basis, chunk, first, self.channel, self.delta)
