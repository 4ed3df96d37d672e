# SPDX-License-Identifier: Apache-2.0
"""Key norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.observe.view import View


@register(
    "knorm",
    "evict",
    "Devoto et al., 2024, arXiv:2406.11430",
    example="knorm:0.5",
    cases=("knorm:0.5", "knorm:budget=9"),
)
@dataclass
class KnormPress(ScorerPress):
    """Score a pair by minus the L2 norm of its key: long keys draw little attention in many models.

        score[b, h, t] = -||k[b, h, t]||

    Paper: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, 2024, arXiv:2406.11430.
    Differs from the paper: nothing.
    """

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`."""
        norms: Tensor = view.keys.to(torch.promote_types(view.keys.dtype, torch.float32)).norm(dim=-1)
        return -norms
