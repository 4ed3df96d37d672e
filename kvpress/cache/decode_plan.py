# SPDX-License-Identifier: Apache-2.0
"""Plan of the decode steps of one layer: one packed call of an operator, repeated until the pairs are stored otherwise."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import Logits, Partial

if TYPE_CHECKING:
    from kvpress.cache.segment import Segment


class DecodePlan:
    """Attention of one new token to all pairs of a layer, by a call that was checked and packed once.

    The cursor of the window holds the plan, so that both end with the block of the window. The plan refers to sealed segments
    and their operands weakly, and is void once one of them is replaced.
    """

    def __init__(
        self,
        call: kernels.DecodeCall,
        segments: Sequence[Segment],
        queries: Tensor,
        logits: Logits,
        pads: Sequence[int],
    ) -> None:
        """Plan to repeat `call`, which read `segments` and the window with `queries [B, Hq, 1, D]`."""
        self._call = call
        self._segments = [weakref.ref(segment) for segment in segments]
        self._shape, self._dtype, self._logits, self._pads = queries.shape, queries.dtype, logits, pads

    def attend(
        self, segments: Sequence[Segment], queries: Tensor, logits: Logits, pads: Sequence[int] | None
    ) -> Partial | None:
        """Attend from `queries [B, Hq, 1, D]` to `segments` and the window, of which `pads[b]` tokens are left padding.

        Returns None if the plan was made for other arguments, or if an operand of a segment was replaced.
        """
        holds = (
            queries.shape == self._shape
            and queries.dtype == self._dtype
            and queries.is_cpu
            and pads == self._pads
            and logits == self._logits
            and len(segments) == len(self._segments)
            and all([planned() is segment for planned, segment in zip(self._segments, segments, strict=True)])
        )
        return self._call.repeat(queries) if holds else None
