"""Attention received during the prompt, per query that could see the token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from kvpress.observe import ColumnMass
from kvpress.presses.base import Observers, ScorerPress, view_of
from kvpress.registry import register


@register("observed_attention", "evict", "Zhang et al., 2023, arXiv:2306.14048")
@dataclass
class ObservedAttentionPress(ScorerPress):
    """Score a pair by the mean attention it received from all queries that could see it.

        score[b, h, t] = sum over i >= t of softmax(q_i . k)[t] / (n - t), mean over the group

    The sums are taken in blocks of queries beside the model's own attention, whatever its implementation; no matrix of
    queries x keys is held.

    Paper: the prompt part of H2O, Zhang et al., 2023, arXiv:2306.14048.
    Differs from the paper: sums are divided by the number of queries that see the token, as in NVIDIA kvpress.
    """

    def observers(self) -> Observers:
        return {**super().observers(), "mass": partial(ColumnMass)}

    def score(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor,
        attentions: Tensor | None, kwargs: dict,
    ) -> Tensor:  # fmt: skip
        """Return `[b, h, n]`."""
        view = view_of(kwargs)
        return view.side["mass"] / view.groups / view.observing_queries()
