# SPDX-License-Identifier: Apache-2.0
"""Corrections of uniform codes: a low-rank part and a few exact outliers, added inside attention (GEAR)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kvpress.cache.storage import Held, part, per_group, per_pair
from kvpress.kernels import Correction
from kvpress.kernels.formats.correction import MOST_CHANNELS
from kvpress.quant.runs import Counts, Runs


@dataclass(eq=False)
class Residual(Held):
    """Correction of keys or values: row `r` gains `factor[r] @ basis[chunk of r]`, and `delta` at the listed channels.

    Both the low-rank part and the outliers are optional.
    """

    chunks: Annotated[Runs, part()]
    """Map from rows to chunks."""
    factor: Annotated[Tensor | None, per_pair()] = None
    """Low-rank factor of each row, `[R, k]`."""
    basis: Annotated[Tensor | None, per_group(axis="chunks")] = None
    """Low-rank basis of each of C chunks, `[C, k, D]`."""
    outliers: Annotated[Counts | None, part()] = None
    """Number of outliers of each row."""
    channel: Annotated[Tensor | None, per_group(axis="outliers")] = None
    """Channels of the outliers in row order, uint8 `[E]`."""
    delta: Annotated[Tensor | None, per_group(axis="outliers")] = None
    """Amounts added at the outliers in row order, `[E]`."""

    def operand(self, total: int) -> Correction:
        """Return the kernel operand, with one chunk index and one first outlier per row."""
        chunk = first = None
        if self.factor is not None:
            chunk = self.chunks.of_rows(total)
            if chunk is None:
                chunk = torch.arange(total, dtype=torch.int32, device=self.factor.device) // self.chunks.size
        if self.outliers is not None:
            first = torch.nn.functional.pad(self.outliers.counts.cumsum(0, dtype=torch.int32), (1, 0))
        return Correction(self.factor, self.basis, chunk, first, self.channel, self.delta)


def check_outliers(dim: int, share: float) -> None:
    """Refuse a share of outliers for heads with more channels than their index, a byte, can count."""
    if share and dim > MOST_CHANNELS:
        raise ValueError(f"outliers must be 0 for heads of more than {MOST_CHANNELS} channels, the model has {dim}")
