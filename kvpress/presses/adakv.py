"""Head-wise budgets from any scorer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.context import View
from kvpress.presses.base import ScorerPress
from kvpress.presses.evict import top
from kvpress.presses.wrapper import WrapperPress
from kvpress.registry import register


@register("adakv", "budget", "Feng et al., 2024, arXiv:2407.11550")
@dataclass
class AdaKVPress(WrapperPress):
    """Let the heads of a layer compete: keep the best pairs of all heads together, so that heads differ in length.

    Each head is sure of `alpha_safeguard` of the mean budget. Storage is ragged, so memory falls by what is evicted.

    Paper: Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation, 2024, arXiv:2407.11550.
    Differs from the paper: the safeguard keeps each head's best pairs before the competition, as in NVIDIA kvpress; the
    authors' code interpolates budgets instead.
    """

    is_head_wise: ClassVar[bool] = True
    by_scores: ClassVar[bool] = True

    press: ScorerPress
    alpha_safeguard: float = 0.20

    def validate(self) -> None:
        super().validate()
        if not 0 <= self.alpha_safeguard <= 1:
            raise ValueError(f"alpha_safeguard must be in [0, 1], got {self.alpha_safeguard}")

    def keep(self, group: list[View], kept: int) -> list[Tensor]:
        return self.compete([self.press.scores(view) for view in group], kept)

    def compete(self, scores: list[Tensor], kept: int) -> list[Tensor]:
        """Mark the best pairs of all heads together, given `scores [b, h, n]` of the views of a group."""
        safe = int(kept * self.alpha_safeguard)
        scores = [score.masked_fill(top(score, min(safe, score.shape[2])), torch.inf) for score in scores]
        rows = scores[0].shape[0]
        total = kept * sum(score.shape[1] for score in scores)
        flat = torch.cat([score.reshape(rows, -1) for score in scores], dim=1)
        mask = top(flat, min(total, flat.shape[1]))
        split = mask.split([score[0].numel() for score in scores], dim=1)
        return [part.view(score.shape) for part, score in zip(split, scores, strict=True)]
