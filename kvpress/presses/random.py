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
        generator = None
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed + 1_000_003 * view.layer + view.seen)
        # All rows share one draw, so that a row's choice does not depend on the other rows of the batch.
        shards = view.call.layer.shards
        uniform = torch.rand(view.shape[1] * shards.count, view.length, generator=generator)
        return shards.part(uniform).to(view.positions.device).expand(view.shape[0], -1, -1)
