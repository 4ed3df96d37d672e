# SPDX-License-Identifier: Apache-2.0
"""Eviction by the attention received during the prompt, per query that could see the token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.observe.mass import AttentionMass
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View


@register(
    "observed_attention",
    "evict",
    "Zhang et al., 2023, arXiv:2306.14048",
    example="observed_attention:0.5",
    cases=("observed_attention:0.5",),
)
@dataclass
class ObservedAttentionPress(ScorerPress):
    """Score a pair by the mean attention that it received from all queries that could see it.

        score[b, h, t] = sum over i >= t of softmax(q_i . k)[t] / (n - t), mean over the group

    The sums are computed in blocks of queries next to the model's own attention, for every attention implementation; the
    matrix of queries x keys is never held whole.

    Paper: the prompt part of H2O, Zhang et al., 2023, arXiv:2306.14048.
    Differs from the paper: sums are divided by the number of queries that see the token, as in NVIDIA kvpress.
    """

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(AttentionMass),)

    def scores(self, view: View) -> Tensor:
        """Return scores `[b, h, n]`."""
        (mass,) = self.wants
        return view.recorded(mass) / view.groups / view.observing_queries(mass)
