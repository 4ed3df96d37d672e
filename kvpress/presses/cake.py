# SPDX-License-Identifier: Apache-2.0
"""Budgets for layers by how widely, and how changeably, the newest tokens look at the older ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.core.checks import Count, NotNegative, Positive
from kvpress.core.recipe import Allocator, evenly
from kvpress.core.registry import Exemption, register
from kvpress.core.scoring import Scored
from kvpress.observe.view import View
from kvpress.presses.snapkv import SnapKVPress


@register(
    "cake",
    "budget",
    "Qin et al., 2025, arXiv:2503.12491",
    example="cake:0.5",
    cases=("cake:0.5,window_size=4", "cake:0.6,window_size=6,tau1=1.6,tau2=0.4"),
    exempt=(Exemption("pairs per layer", "attention shares out the budget among layers; replayed from eager weights"),),
)
@dataclass
class CAKEPress(SnapKVPress):
    """SnapKV with budgets that follow the attention of each layer, and scores that value attention that shifts.

        a           = attention of the last w queries i, the window, on the older tokens t
        budget - w  ~ (-sum_{h, i, t} a log a) ** (1 / tau1) * (sum_{h, t} var_i a) ** (1 / tau2)      of a layer
        score[h, t] = mean over the group of avg_pool(mean_i a + gamma * var_i a)

    Layers whose attention is dispersed and shifts get more, tempered by `tau1` and `tau2`; what one cannot hold goes to the
    others, and the total is met exactly. `gamma` weighs the shift of a token, `window_size` is w.

    Paper: Qin et al., CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences, 2025, arXiv:2503.12491.
    Differs from the paper: layers are cut once all have been read, and not in a cascade, which holds less while it reads and
    ends with the same pairs but for rounding; what a layer cannot hold is shared out by preference, in the authors' code
    evenly; generated tokens are kept, unless inside `DecodingPress`.
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

    def preference(self, view: View, width: int) -> Tensor:
        """How much the layer of a row wants to keep, a number in float64."""
        sums = torch.zeros(2, dtype=torch.float64, device=view.positions.device)
        for weights in self.older_attention(view, width):
            sums += torch.stack(
                [part.sum(dtype=torch.float64) for part in (torch.special.entr(weights), shift(weights))]
            )
        return sums[0] ** (1 / self.tau1) * sums[1] ** (1 / self.tau2)


def shift(weights: Tensor) -> Tensor:
    """How much attention `[b, G, w, m]` varies over w queries, `[b, G, m]`."""
    return weights.var(dim=2, correction=min(1, weights.shape[2] - 1))


@dataclass(frozen=True)
class ByPreference(Allocator):
    """Shares out the pairs of a row among its layers; a head that has a length of its own counts as a layer."""

    press: CAKEPress

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        windows = [min(self.press.window_size, each.view.length) for each in scored]
        if mean * len(scored) <= sum(windows):
            return evenly(scored, mean)
        wanted = [self.press.preference(each.whole, width).cpu() for each, width in zip(scored, windows, strict=True)]
        room = [each.view.length - width for each, width in zip(scored, windows, strict=True)]
        shares = share_out(mean * len(scored) - sum(windows), torch.stack(wanted), torch.tensor(room))
        return [width + share for width, share in zip(windows, shares, strict=True)]

    def within_layers(self) -> Allocator:
        return Allocator()


def share_out(total: int, wanted: Tensor, room: Tensor) -> list[int]:
    """Share out `total` in proportion to what is `wanted`, within the room, by largest remainder."""
    total, wanted, part = min(total, int(room.sum())), wanted.clamp_min(1e-300), torch.zeros_like(wanted)
    for _ in range(len(room) + 1):  # every time but the last fills up another one
        free = part < room
        part = torch.where(free, wanted * ((total - room[~free].sum()) / wanted[free].sum()), room)
    given = part.long()
    rest = (part - given).argsort(descending=True, stable=True)[: total - int(given.sum())]
    return given.index_add(0, rest, torch.ones_like(rest)).tolist()
