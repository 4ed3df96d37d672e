"""Attention of the prompt's last tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvpress.core.checks import Count
from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import RecentQueries
from kvpress.observe.view import View


@register(
    "snapkv", "evict", "Li et al., 2024, arXiv:2404.14469", example="snapkv:0.5", cases=("snapkv:0.5,window_size=4",)
)
@dataclass
class SnapKVPress(ScorerPress):
    """Score a pair by the attention that the last `window_size` tokens pay it, smoothed over its neighbours.

        a[b, g, t] = mean over the last w queries i of softmax(q_i . k)[t],   t < n - w
        score      = mean over the query heads of the group of avg_pool(a, kernel_size)

    The window itself is always kept; prompts that fit into it are left whole. `kernel_size` is the odd number of neighbours
    that share a score; 1 smooths nothing.

    Paper: Li et al., SnapKV: LLM Knows What You Are Looking for Before Generation, 2024, arXiv:2404.14469.
    Differs from the paper: query heads of a group share one choice, the mean of their scores, because they share keys.
    """

    window_size: Count = 64
    kernel_size: Count = 5

    def validate(self) -> None:
        super().validate()
        if self.kernel_size % 2 == 0:
            raise ValueError(f"kernel_size must be odd, got {self.kernel_size}")

    @property
    def protected(self) -> int:
        return self.window_size

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(RecentQueries, self.window_size),)

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`, infinite in the window."""
        width = min(self.window_size, view.length)
        older = view.per_head() if view.length > width else []
        scores = [self._head_score(head, width) for head in older]
        window = torch.full((*view.shape[:2], width), torch.inf, device=view.positions.device)
        return torch.cat([torch.cat(scores, dim=1), window], dim=-1) if scores else window

    def _head_score(self, view: View, width: int) -> Tensor:
        weights = view.attention(view.newest_queries(*self.wants))[..., : view.length - width]
        smooth = avg_pool1d(weights.mean(dim=3).squeeze(1), self.kernel_size, stride=1, padding=self.kernel_size // 2)
        return smooth.mean(dim=1, keepdim=True)
