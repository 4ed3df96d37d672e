# SPDX-License-Identifier: Apache-2.0
"""Budgets that follow a weight of every head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.core.recipe import Allocator, evenly
from kvpress.core.scoring import Scored
from kvpress.observe.view import View
from kvpress.presses.cake import share_out


@dataclass(frozen=True)
class HeadShares(Allocator):
    """Leaves every head its newest `window` pairs, and shares out the others of a row among all heads by their weights.

    What a head cannot hold goes to the others; the total is met exactly. Subclasses give `weights`.
    """

    window: int

    ragged = True

    @abstractmethod
    def weights(self, views: Sequence[View]) -> list[Tensor]:
        """Return how much each head of the views of a row, in all layers, is to get: `[h]` per view, float64, above 0."""

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        heads = [each.view.shape[1] for each in scored]
        lengths = [min(self.window, each.view.length) for each in scored for _ in range(each.view.shape[1])]
        rest = mean * len(lengths) - sum(lengths)
        if rest <= 0:
            return evenly(scored, mean)
        room = [each.view.length for each in scored for _ in range(each.view.shape[1])]
        wanted = torch.cat([part.cpu() for part in self.weights([each.whole for each in scored])])
        shares = share_out(rest, wanted, torch.tensor(room) - torch.tensor(lengths))
        counts = torch.tensor(lengths) + torch.tensor(shares)
        return [
            part[None].to(each.view.positions.device) for part, each in zip(counts.split(heads), scored, strict=True)
        ]

    def within_layers(self) -> Allocator:
        return Allocator()
