# SPDX-License-Identifier: Apache-2.0
"""SnapKV: eviction by the attention of the last tokens of the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvpress.core.checks import Count, Odd
from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.observe.view import View
from kvpress.presses.window import NewestWindow, newest_pairs


@register(
    "snapkv",
    "evict",
    "Li et al., 2024, arXiv:2404.14469",
    example="snapkv:0.5",
    cases=("snapkv:0.5,window_size=4",),
    status="recommended",
)
@dataclass
class SnapKVPress(NewestWindow, ScorerPress):
    """Score a pair by the attention of the last `window_size` tokens to it, smoothed over neighbours; needs the question there.

        a[b, g, t] = mean over the last w queries i of softmax(q_i . k)[t],   t < n - w
        score      = mean over the query heads of the group of avg_pool(a, kernel_size)

    The window itself is always kept; a prompt that fits into the window is not evicted from. `window_size` is w, the
    number of newest tokens whose queries score all others. `kernel_size` is the odd number of neighbours that are
    averaged; 1 turns smoothing off. The defaults are those of NVIDIA kvpress.

    The last tokens have to hold the question: without it, SmolLM2-135M-Instruct answers 12% of the questions on 1024 tokens
    from half of the pairs (full cache 80%, `docs/real-models.md`). A window of about its length and a wide smoothing find more:
    with questions of 17 tokens in sight, a quarter of the pairs answers 90% with `window_size=20,kernel_size=21`, and 10% with
    the defaults (`docs/accuracy.md`).

    Paper: Li et al., SnapKV: LLM Knows What You Are Looking for Before Generation, 2024, arXiv:2404.14469.
    Differs from the paper: query heads of a group share one choice, the mean of their scores, because they share keys.
    """

    window_size: Count = 64
    kernel_size: Odd = 5

    def scores(self, view: View) -> Tensor:
        """Return scores `[b, h, n]`, infinite in the window."""
        width = newest_pairs(view, self.window_size)
        older = self.older_attention(view, width) if view.length > width else ()
        scores = [
            avg_pool1d(self.worth(weights), self.kernel_size, stride=1, padding=self.kernel_size // 2).mean(dim=1)
            for weights in older
        ]
        window = torch.full((*view.shape[:2], width), torch.inf, device=view.positions.device)
        return torch.cat([torch.stack(scores, dim=1), window], dim=-1) if scores else window

    def worth(self, weights: Tensor) -> Tensor:
        """Return the importance `[b, G, m]` of pairs from the attention `weights [b, G, w, m]` of w queries to them."""
        return weights.mean(dim=2)

    def older_attention(self, view: View, width: int) -> Iterator[Tensor]:
        """Yield, for every KV head, the attention `[b, G, w, m]` of the window to the m older pairs."""
        for head in view.per_head():
            yield head.attention(head.newest_queries(*self.wants))[:, 0, ..., : view.length - width]
