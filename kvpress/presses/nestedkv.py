# SPDX-License-Identifier: Apache-2.0
"""Scores by the distance of a key from the means of all keys, of its block and of its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, pad

from kvpress.core.checks import Count, NotNegative, Share
from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.observe.view import View
from kvpress.presses.chunkkv import ranks


@register(
    "nestedkv",
    "evict",
    "after NestedKV, 2026, arXiv:2605.26678",
    example="nestedkv:0.5",
    cases=("nestedkv:0.5,block_size=8,window_size=4",),
    status="experimental",
)
@dataclass
class NestedKVPress(ScorerPress):
    """Keep the pairs whose keys are unusual at one of three scales: in the prompt, in their block, among their neighbours.

        anomaly[s, t] = 1 - cos(k[t], a[s, t])
        r[s, t]       = rank of anomaly[s, t] among the n pairs of the head, over n
        w[s]          = softmax over s of beta * std over t of anomaly[s, t] / largest such std of the head
        g[t]          = sigmoid(kappa * (max over s of r[s, t] - sum over s of w[s] r[s, t] - tau))
        score[t]      = (1 - g[t]) * sum over s of w[s] r[s, t] + g[t] * max over s of r[s, t]

    The anchors a are the mean key of the head, of the block of `block_size` tokens that holds t, and of the newest
    `window_size` pairs up to t. `beta` is the preference for scales of larger spread; 0 weighs all alike. A pair goes
    by its best scale alone if that scale's rank is more than `tau` above the mixture; `kappa` is the slope of this switch.
    No queries are needed, so the choice does not depend on the question.

    Paper: NestedKV, 2026, arXiv:2605.26678; only its abstract and a port's constants (beta 3, tau 0.6, kappa 10) were at hand.
    Differs from the paper: the spread as the measure of a scale, the switch and the sizes of block and window are ours, and
    heads keep equally many pairs, where the paper's budgets adapt to the heads.
    """

    block_size: Count = 128
    window_size: Count = 32
    beta: NotNegative = 3.0
    tau: Share = 0.6
    kappa: NotNegative = 10.0

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`."""
        return torch.cat([self._of_head(head) for head in view.per_head()], dim=1)

    def _of_head(self, view: View) -> Tensor:
        keys = view.keys.float()
        anchors = (
            keys.mean(dim=2, keepdim=True),
            block_means(keys, view.positions // self.block_size),
            trailing_means(keys, self.window_size),
        )
        anomaly = torch.stack([1 - cosine_similarity(keys, anchor, dim=-1) for anchor in anchors])
        spread = anomaly.std(dim=-1, keepdim=True, correction=0)
        weight = torch.softmax(self.beta * spread / spread.amax(dim=0).clamp_min(1e-30), dim=0)
        rank = (1 + ranks(anomaly)).float() / anomaly.shape[-1]
        mixed, best = (weight * rank).sum(dim=0), rank.amax(dim=0)
        switch = torch.sigmoid(self.kappa * (best - mixed - self.tau))
        return torch.lerp(mixed, best, switch)


def block_means(keys: Tensor, block: Tensor) -> Tensor:
    """Return the mean of the keys `[b, h, n, D]` with the same number in `block [b, h, n]`, for each key."""
    blocks = int(block.max()) + 1
    total = keys.new_zeros(*keys.shape[:2], blocks, keys.shape[3])
    count = keys.new_zeros(*keys.shape[:2], blocks)
    index = block[..., None].expand_as(keys)
    total.scatter_add_(2, index, keys)
    count.scatter_add_(2, block, torch.ones_like(block, dtype=keys.dtype))
    means: Tensor = (total / count.clamp_min(1)[..., None]).gather(2, index)
    return means


def trailing_means(keys: Tensor, width: int) -> Tensor:
    """Return the mean of each of the keys `[b, h, n, D]` and of up to `width - 1` keys before it."""
    total = pad(keys.double().cumsum(dim=2), (0, 0, width, 0))
    count = torch.arange(1, keys.shape[2] + 1, device=keys.device).clamp_max(width)
    return ((total[:, :, width:] - total[:, :, :-width]) / count[:, None]).to(keys.dtype)
