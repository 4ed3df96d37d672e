# SPDX-License-Identifier: Apache-2.0
"""Head budgets in proportion to a weight per head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.core.recipe import Allocator, evenly
from kvpress.core.scoring import Scored
from kvpress.presses.cake import share_out


@dataclass(frozen=True)
class HeadShares(Allocator):
    """Allocator that shares the budget of a row among all heads of all layers, in proportion to `weights`.

    Pairs above the length of a head go to other heads, so the total is met exactly. Subclasses define `weights`.
    """

    window: int
    """Number of newest pairs that every head keeps, before the budget is shared."""

    ragged = True

    @abstractmethod
    def weights(self, scored: Sequence[Scored]) -> list[Tensor]:
        """Return the weight of each head of the items of a row, in all layers: `[h]` per item, float64, above 0."""

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        heads = [item.view.shape[1] for item in scored]
        windows = [min(self.window, item.view.length) for item in scored for _ in range(item.view.shape[1])]
        surplus = mean * len(windows) - sum(windows)
        if surplus <= 0:
            return evenly(scored, mean)
        lengths = [item.view.length for item in scored for _ in range(item.view.shape[1])]
        weights = torch.cat([weights.cpu() for weights in self.weights(scored)])
        shares = share_out(surplus, weights, torch.tensor(lengths) - torch.tensor(windows))
        counts = torch.tensor(windows) + torch.tensor(shares)
        return [count[None].to(item.view.device) for count, item in zip(counts.split(heads), scored, strict=True)]

    def within_layers(self) -> Allocator:
        return Allocator()
