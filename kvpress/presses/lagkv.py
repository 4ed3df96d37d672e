# SPDX-License-Identifier: Apache-2.0
"""LagKV: channel spread of pairs, normalised by the range of the pairs that follow."""

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
    """Score a pair by the spread of its channels, after each channel is normalised to its range in the next lag.

        x[t, c]  = (k[t, c] - min[c]) / (max[c] - min[c]),   min and max over the next `lag_size` keys
        a[t]     = softmax over the lag of t of std over c of x[t, c],   b[t] the same of values
        score[t] = rank of (a[t] + b[t]) / 2 within the lag / lag_size

    Behind the first `n_sink` pairs, which are always kept, the pairs of a head are cut into lags of `lag_size`. The last
    complete lag and the pairs after it have no reference: they are kept, the newest first where the budget is smaller.
    `cross_scoring` compares the softmax weights themselves instead of ranks, so that lags, and heads under `adakv`,
    compete. With fewer than two lags the newest pairs are kept. No queries are needed.

    Paper: Liang et al., LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important, 2025,
    arXiv:2504.04704.
    Differs from the paper: a channel that is constant in the reference counts as 0 instead of dividing by zero; all lags of
    a prompt compete for its budget at once.
    """

    n_sink: Size = 4
    lag_size: Count = 128
    cross_scoring: bool = False

    @property
    def protected(self) -> int:
        return self.n_sink

    def scores(self, view: View) -> Tensor:
        """Return scores `[b, h, n]`, infinite for sinks; pairs without a reference score above 1."""
        rows, heads, length = view.shape
        order = torch.arange(length, device=view.positions.device)
        scores = (2 + order / length).expand(rows, heads, -1).clone()
        lags = max(0, length - self.n_sink) // self.lag_size - 1
        if lags > 0:
            scored = slice(self.n_sink, self.n_sink + lags * self.lag_size)
            worth = (self._spread(view.keys, lags) + self._spread(view.values, lags)) / 2
            if not self.cross_scoring:
                worth = worth.argsort(dim=-1, stable=True).argsort(dim=-1) / self.lag_size
            scores[..., scored] = worth.flatten(2)
        return scores.masked_fill(order < self.n_sink, torch.inf)

    def _spread(self, vectors: Tensor, lags: int) -> Tensor:
        """Return a or b, `[b, h, lags, lag_size]`, of keys or values `[b, h, n, D]`."""
        in_lags = vectors[:, :, self.n_sink : self.n_sink + (lags + 1) * self.lag_size]
        blocks = in_lags.float().unflatten(2, (lags + 1, self.lag_size))
        minimum, maximum = blocks[:, :, 1:].aminmax(dim=3, keepdim=True)
        span = maximum - minimum
        relative = torch.where(span > 0, (blocks[:, :, :-1] - minimum) / span, 0.0)
        return relative.std(dim=-1, correction=0).softmax(dim=-1)
