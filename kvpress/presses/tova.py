# SPDX-License-Identifier: Apache-2.0
"""TOVA: eviction by the attention of the newest token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import RecentQueries
from kvpress.observe.view import View
from kvpress.presses.window import newest_pairs


@register("tova", "evict", "Oren et al., 2024, arXiv:2401.06104", example="tova:0.5", cases=("tova:0.5",))
@dataclass
class TOVAPress(ScorerPress):
    """Score a token by the attention of the newest token to it, averaged over all heads of the layer.

        score[b, :, t] = mean over query heads of softmax(q_last . k)[t]

    Paper: Oren et al., Transformers are Multi-State RNNs, 2024, arXiv:2401.06104.
    Differs from the paper: the newest token is always kept. The paper evicts during generation: wrap the press in
    `DecodingPress` for that.
    """

    @property
    def protected(self) -> int:
        return 1

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(RecentQueries, 1),)

    def scores(self, view: View) -> Tensor:
        """Return scores `[b, h, n]`, the same for every head, infinite for the newest token."""
        weights = view.attention(view.newest_queries(*self.wants)).squeeze(3)
        scores = view.mean_of_heads(weights.mean(dim=2)).repeat(1, view.shape[1], 1)
        scores[..., view.length - newest_pairs(view, 1) :] = torch.inf
        return scores
