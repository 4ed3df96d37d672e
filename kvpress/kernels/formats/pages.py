# SPDX-License-Identifier: Apache-2.0
"""Pages of stored rows: the operand from which the rows of the pages with the largest bounds are listed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvpress.kernels.formats.dense import Dense
from kvpress.kernels.formats.fields import CallTemplate
from kvpress.kernels.formats.operand import Caching, Ranges


@dataclass(frozen=True, eq=False)
class Pages(Caching):
    """Bounds of the keys of pages, and the pages and rows of each stream.

    Reuse the object for pages that are read many times: it caches its argument checks and its packed C structs.
    """

    low: Tensor
    """Channel-wise minimum of the keys of each page, float32, bfloat16 or float16 [pages, D]."""
    high: Tensor
    """Channel-wise maximum, as low."""
    where: Ranges
    """Pages of each stream."""
    pairs: Ranges
    """Rows of each stream."""
    size: int
    """Rows of a page."""
    longest: int
    """Most rows of a stream."""
    capacity: int
    """Most pages of a stream."""

    @cached_property
    def fits(self) -> set[tuple[int, int, torch.device]]:
        """Numbers of streams, head dimensions and devices of queries that these pages were checked with."""
        return set()

    @cached_property
    def templates(self) -> dict[Hashable, CallTemplate]:
        """C structs of calls that read these pages, by the settings of the call."""
        return {}

    @cached_property
    def bounds(self) -> tuple[Dense, Dense]:
        """Both bounds as operands."""
        return Dense(self.low), Dense(self.high)
