# SPDX-License-Identifier: Apache-2.0
"""Random eviction: the baseline that every scorer has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.core.checks import Size
from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.observe.view import View


@register("random", "evict", example="random:0.5,seed=3", cases=("random:0.5,seed=3",), status="reproduction")
@dataclass
class RandomPress(ScorerPress):
    """Score every pair with an independent uniform number.

    `seed` makes the choice reproducible; the numbers differ between layers and lengths, and are the same on every device.

    Paper: none.
    Differs from the paper: nothing.
    """

    seed: Size | None = None

    def scores(self, view: View) -> Tensor:
        """Return uniform numbers `[b, h, n]`."""
        if self.seed is not None:
            return view.numbers(self.seed)
        # One seed for all views of a layer, so that a pair keeps its number from block to block.
        memo, key = (view if view.whole is None else view.whole).memo, (RandomPress, id(self))
        if key not in memo:
            memo[key] = int(torch.randint(2**31, ()))
        return view.numbers(memo[key])
