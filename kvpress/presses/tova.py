"""Attention of the last token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kvpress.observe import RecentQueries
from kvpress.presses.base import Observers, ScorerPress, view_of
from kvpress.registry import register


@register("tova", "evict", "Oren et al., 2024, arXiv:2401.06104")
@dataclass
class TOVAPress(ScorerPress):
    """Score a token by the attention that the newest token pays it, averaged over all heads of the layer.

        score[b, :, t] = mean over query heads of softmax(q_last . k)[t]

    Paper: Oren et al., Transformers are Multi-State RNNs, 2024, arXiv:2401.06104.
    Differs from the paper: the newest token is always kept. The paper evicts while generating: put the press into
    `DecodingPress` for that.
    """

    @property
    def protected(self) -> int:
        return 1

    def observers(self) -> Observers:
        return {**super().observers(), "queries": partial(RecentQueries, 1)}

    def score(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor,
        attentions: Tensor | None, kwargs: dict,
    ) -> Tensor:  # fmt: skip
        """Return `[b, h, n]`, the same for every head, infinite for the newest token."""
        view = view_of(kwargs)
        weights = view.attention(view.newest_queries(1)).squeeze(3)
        scores = weights.mean(dim=(1, 2), keepdim=True).squeeze(2).repeat(1, keys.shape[1], 1)
        scores[..., -1] = torch.inf
        return scores
