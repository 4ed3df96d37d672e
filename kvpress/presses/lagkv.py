# SPDX-License-Identifier: Apache-2.0
"""Pairs that vary most among their channels, as the stretch that follows sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.core.checks import Count, Size
from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.observe.view import View


@register(
    "lagkv",
    "evict",
    "Liang et al., 2025, arXiv:2504.04704",
    example="lagkv:0.5",
    cases=("lagkv:0.5,lag_size=6", "lagkv:0.6,n_sink=2,lag_size=5,cross_scoring=true"),
)
@dataclass
class LagKVPress(ScorerPress):
    """Score a pair by how unevenly its channels spread, once the range of the next lag has been taken out of each.

        x[t, c]  = (k[t, c] - min[c]) / (max[c] - min[c]),   min and max over the next `lag_size` keys
        a[t]     = softmax over the lag of t of std over c of x[t, c],   b[t] the same of values
        score[t] = rank of (a[t] + b[t]) / 2 within the lag / lag_size

    Behind the first `n_sink` pairs, which always stay, a head's pairs are cut into lags of `lag_size`. The last whole lag and
    what follows have no reference: they stay, the newest first where the budget is smaller. `cross_scoring` compares the
    softmax weights themselves instead of ranks, so that lags, and heads under `adakv`, compete. With fewer than two lags the
    newest pairs stay. No queries are needed.

    Paper: Liang et al., LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important, 2025,
    arXiv:2504.04704.
    Differs from the paper: a channel that is constant in the reference counts as 0 instead of dividing by zero; all lags of a
    prompt compete for its budget at once.
    """

    n_sink: Size = 4
    lag_size: Count = 128
    cross_scoring: bool = False

    @property
    def protected(self) -> int:
        return self.n_sink

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`, infinite for the first pairs; those without a reference score above 1."""
        rows, heads, length = view.shape
        order = torch.arange(length, device=view.positions.device)
        scores = (2 + order / length).expand(rows, heads, -1).clone()
        lags = max(0, length - self.n_sink) // self.lag_size - 1
        if lags > 0:
            judged = slice(self.n_sink, self.n_sink + lags * self.lag_size)
            worth = (self._spread(view.keys, lags) + self._spread(view.values, lags)) / 2
            if not self.cross_scoring:
                worth = worth.argsort(dim=-1, stable=True).argsort(dim=-1) / self.lag_size
            scores[..., judged] = worth.flatten(2)
        return scores.masked_fill(order < self.n_sink, torch.inf)

    def _spread(self, vectors: Tensor, lags: int) -> Tensor:
        """Return a or b, `[b, h, lags, lag_size]`, of keys or values `[b, h, n, D]`."""
        whole = vectors[:, :, self.n_sink : self.n_sink + (lags + 1) * self.lag_size]
        parts = whole.float().unflatten(2, (lags + 1, self.lag_size))
        least, most = parts[:, :, 1:].aminmax(dim=3, keepdim=True)
        span = most - least
        relative = torch.where(span > 0, (parts[:, :, :-1] - least) / span, 0.0)
        return relative.std(dim=-1, correction=0).softmax(dim=-1)
