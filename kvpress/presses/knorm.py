"""Key norm."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from kvpress.presses.base import ScorerPress
from kvpress.registry import register


@register("knorm", "evict", "Devoto et al., 2024, arXiv:2406.11430")
@dataclass
class KnormPress(ScorerPress):
    """Score a pair by minus the L2 norm of its key: long keys draw little attention in many models.

        score[b, h, t] = -||k[b, h, t]||

    Paper: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, 2024, arXiv:2406.11430.
    Differs from the paper: nothing.
    """

    def score(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor,
        attentions: Tensor | None, kwargs: dict,
    ) -> Tensor:  # fmt: skip
        """Return `[b, h, n]`."""
        return -keys.float().norm(dim=-1)
