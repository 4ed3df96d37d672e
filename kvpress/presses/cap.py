# SPDX-License-Identifier: Apache-2.0
"""Scores by the capacity that a value adds to the output, weighted by expected queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvpress.core.checks import Count, NotNegative, Size
from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import QueryStats
from kvpress.observe.view import View
from kvpress.presses.expected_attention import mean_rotation


@register(
    "cap", "evict", "CAPKV, 2026, arXiv:2604.25975", example="cap:0.5", cases=("cap:0.5", "cap:0.5,tau=1.0,n_sink=2")
)
@dataclass
class CapPress(ScorerPress):
    """Score a pair by the capacity that its value adds to the output, weighted by its key's similarity to future queries.

        w[t]     = exp(tau cos(k_t, R mu) - maximum over t)
        A        = I + sum over t of (w[t] + epsilon) v_t v_t^T
        score[t] = mean over the query heads of the group of w[t] v_t^T A^-1 v_t

    mu is the mean of a query head's queries before rotation, without those of the first `n_sink` tokens, and R the mean
    rotation of the next `n_future_positions` positions. A value that is nearly a combination of others adds little. The first
    `n_sink` tokens always stay and are not part of A. A larger `tau` separates keys more sharply; `epsilon` is the least
    weight of a value in A.

    Paper: CAPKV, 2026, arXiv:2604.25975.
    Differs from the paper: as in NVIDIA kvpress, keys and queries are compared by their cosine and rotated to future
    positions; queries are recorded in the attention, and future positions start at the true next one.
    """

    tau: NotNegative = 5.0
    n_future_positions: Count = 512
    n_sink: Size = 4
    epsilon: NotNegative = 1e-6

    @property
    def protected(self) -> int:
        return self.n_sink

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(QueryStats, self.n_sink),)

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`, infinite for sinks."""
        mean, _ = view.observer(*self.wants).moments(list(range(view.call.store.batch)))
        mean, future = view.query_heads(mean), view.call.next_positions(view.rows, view.seen, self.n_future_positions)
        anchors = mean_rotation(view.call, future)(mean[:, :, None])[:, :, 0]
        scores = torch.empty(view.shape, device=anchors.device)
        for h, queries in enumerate(anchors.unflatten(1, (view.shape[1], -1)).unbind(dim=1)):
            sinks = view.positions[:, h] < self.n_sink
            keys, values = view.keys[:, h].float(), view.values[:, h].float()
            scores[:, h] = sum(self._capacity(keys, values, query, sinks) for query in queries.unbind(dim=1))
        return (scores / view.groups).masked_fill(view.positions < self.n_sink, torch.inf)

    def _capacity(self, keys: Tensor, values: Tensor, query: Tensor, sinks: Tensor) -> Tensor:
        """Return the scores `[b, n]` of one query head: `keys [b, n, D]`, `values [b, n, Dv]`, `query [b, D]`."""
        logits = self.tau * cosine_similarity(keys, query[:, None], dim=-1).masked_fill(sinks, -torch.inf)
        weights = torch.exp(logits - logits.amax(dim=1, keepdim=True)).nan_to_num(0.0)
        scaled = values * ((weights + self.epsilon) * ~sinks).sqrt()[..., None]
        eye = torch.eye(values.shape[2], dtype=torch.float64, device=values.device)
        factor = torch.linalg.cholesky(eye + (scaled.transpose(1, 2) @ scaled).double())
        whiten: Tensor = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False).transpose(1, 2)
        return weights * (values @ whiten.float()).square().sum(dim=2)
