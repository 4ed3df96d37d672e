# SPDX-License-Identifier: Apache-2.0
"""Layer budgets from the entropy and variance of the newest tokens' attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.core.checks import Count, NotNegative, Positive
from kvpress.core.recipe import Allocator, evenly
from kvpress.core.registry import Exemption, register
from kvpress.core.scoring import Scored
from kvpress.presses.snapkv import SnapKVPress


@register(
    "cake",
    "budget",
    "Qin et al., 2025, arXiv:2503.12491",
    example="cake:0.5",
    cases=("cake:0.5,window_size=4", "cake:0.6,window_size=6,tau1=1.6,tau2=0.4"),
    exempt=(Exemption("pairs per layer", "layers have budgets by their attention; replayed from eager weights"),),
)
@dataclass
class CAKEPress(SnapKVPress):
    """Score as `SnapKVPress` plus the variance of attention, with layer budgets from entropy and variance of attention.

        a           = attention of the last w queries i, the window, on the older tokens t
        budget - w  ~ (-sum_{h, i, t} a log a) ** (1 / tau1) * (sum_{h, t} var_i a) ** (1 / tau2)      of a layer
        score[h, t] = mean over the group of avg_pool(mean_i a + gamma * var_i a)

    Layers with more dispersed and more variable attention get more pairs. Larger `tau1` and `tau2` make the budgets of layers
    more equal. Pairs above the length of a layer go to other layers, and the total is met exactly. `gamma` is the weight of the
    variance in scores. `window_size` is w, the number of newest tokens whose queries are used.

    Paper: Qin et al., CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences, 2025, arXiv:2503.12491.
    Differs from the paper: pairs are evicted once all layers have been read, not in a cascade, which needs less memory while
    it reads and ends with the same pairs except for rounding; pairs above the length of a layer are shared by preference, in
    the authors' code evenly; generated tokens are kept, unless inside `DecodingPress`.
    """

    window_size: Count = 32
    gamma: NotNegative = 200.0
    tau1: Positive = 1.0
    tau2: Positive = 1.0

    @property
    def allocator(self) -> Allocator:
        return ByPreference(self, scope="cache")

    def worth(self, weights: Tensor) -> Tensor:
        return super().worth(weights) + self.gamma * shift(weights)

    def spreads(self, scored: Scored, width: int | Tensor) -> Tensor:
        """Return the entropy and the variance of a row's attention to its older pairs, `[1, h, 2]`, float64 on the host."""
        view = scored.whole
        sums = [
            torch.stack([terms.sum(dtype=torch.float64) for terms in (torch.special.entr(weights), shift(weights))])
            for weights in self.older_attention(view, int(width))
        ]
        return torch.stack(sums)[None].cpu()

    def preference(self, spreads: Tensor) -> Tensor:
        """Return the preference of a row's layer, a scalar: the layer's budget is proportional to it."""
        entropy, variance = spreads.sum(dim=(0, 1))
        preference: Tensor = entropy ** (1 / self.tau1) * variance ** (1 / self.tau2)
        return preference


def shift(weights: Tensor) -> Tensor:
    """Return the variance of attention `[b, G, w, m]` over the w queries, `[b, G, m]`."""
    return weights.var(dim=2, correction=min(1, weights.shape[2] - 1))


@dataclass(frozen=True)
class ByPreference(Allocator):
    """Allocator that shares the budget of a row among its layers; a head of its own length counts as a layer."""

    press: CAKEPress
    """Source of `window_size` and of preferences."""

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        windows = [min(self.press.window_size, item.view.length) for item in scored]
        if mean * len(scored) <= sum(windows):
            return evenly(scored, mean)
        weights = [
            self.press.preference(item.share(self.press.spreads, width))
            for item, width in zip(scored, windows, strict=True)
        ]
        limits = [item.view.length - width for item, width in zip(scored, windows, strict=True)]
        shares = share_out(mean * len(scored) - sum(windows), torch.stack(weights), torch.tensor(limits))
        return [width + share for width, share in zip(windows, shares, strict=True)]

    def within_layers(self) -> Allocator:
        return Allocator()


def share_out(total: int, weights: Tensor, limits: Tensor) -> list[int]:
    """Return integers in proportion to `weights [n]`, at most `limits [n]`, that add up to `total`, by largest remainder."""
    total, weights, shares = min(total, int(limits.sum())), weights.clamp_min(1e-300), torch.zeros_like(weights)
    for _ in range(len(limits) + 1):  # each pass except the last fills at least one share up to its limit
        free = shares < limits
        shares = torch.where(free, weights * ((total - limits[~free].sum()) / weights[free].sum()), limits)
    counts = shares.long()
    rounded_up = (shares - counts).argsort(descending=True, stable=True)[: total - int(counts.sum())]
    return counts.index_add(0, rounded_up, torch.ones_like(rounded_up)).tolist()
