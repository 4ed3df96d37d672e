"""Random eviction: the floor that every scorer has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvpress.checks import check_count
from kvpress.presses.base import ScorerPress, view_of
from kvpress.registry import register


@register("random", "evict")
@dataclass
class RandomPress(ScorerPress):
    """Score every pair with an independent uniform number.

    `seed` makes the choice reproducible; each layer and length draws its own numbers, the same on every device.

    Paper: none.
    Differs from the paper: nothing.
    """

    seed: int | None = None

    def validate(self) -> None:
        super().validate()
        if self.seed is not None:
            check_count("seed", self.seed, least=0)

    def score(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor,
        attentions: Tensor | None, kwargs: dict,
    ) -> Tensor:  # fmt: skip
        """Return uniform numbers `[b, h, n]`."""
        view = view_of(kwargs)
        generator = None
        if self.seed is not None:
            generator = torch.Generator().manual_seed(self.seed + 1_000_003 * view.call.layer + view.seen)
        shape = keys.shape[1:3]
        # One draw for all rows: a row's choice must not depend on its neighbours in the batch.
        return torch.rand(shape, generator=generator).to(keys.device).expand(keys.shape[0], -1, -1)
