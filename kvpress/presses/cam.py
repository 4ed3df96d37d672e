# SPDX-License-Identifier: Apache-2.0
"""Merging of evicted values into the kept pairs that follow them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from kvpress.core.checks import Count
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Eviction, Recipe, Rewritten
from kvpress.core.registry import Refusal, register
from kvpress.observe.mass import AttentionMass
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View
from kvpress.presses.decoding import DecodingPress

MASS = Wanted(AttentionMass)


@register(
    "cam",
    "schedule",
    example="cam(knorm):compression_interval=128,target_size=1024",
    refuses=(
        Refusal("cam(knorm) + kivi:bits=4", "it changes pairs while tokens are generated, which a codec has sealed"),
    ),
    status="reproduction",
)
@dataclass
class CAMPress(DecodingPress):
    """Evict as `DecodingPress`, and merge evicted values into the next kept pairs of their head.

        v[j] += x[i] v[i] / m                   for an evicted pair i and the next m kept pairs j after it
        x[i] ~ Bernoulli(min(1, A[i] / mean of A over these j)),    A[t] = sum of the attention on t so far

    `merge_budget` is m, the number of kept pairs that a value is merged into; near the end there are fewer. Random numbers
    depend on the layer and the length only, so they are the same for all rows and in every run.

    Paper: Zhang et al., CaM: Cache Merging for Memory-efficient LLMs Inference, ICML 2024, PMLR 235.
    Differs from the paper: as in NVIDIA kvpress, all pairs evicted after an interval are merged together and A is a sum over
    queries, where the authors' code merges one token at a time by the newest query alone. Unlike in NVIDIA kvpress, the sum
    begins with the prompt, each head chooses its own pairs, and the first eviction also merges the surplus of the prompt.
    """

    merge_budget: Count = 32

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        recipe = super().recipe(model)
        return replace(recipe, observers=(*recipe.observers, MASS))

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        return super().wrap(step, model).rewriting(partial(merge_values, size=self.merge_budget))


def merge_values(view: View, mask: Tensor, size: int) -> Rewritten:
    """Merge values outside `mask [b, h, n]` into the next `size` values of their head inside it, fewer near the end."""
    rank = mask.long().cumsum(dim=2)

    def up_to(sums: Tensor, kept: Tensor) -> Tensor:
        """Return the running `sums [b, h, n, D]` at the kept pairs of number `kept [b, h, n]` in their head, from 1."""
        at_kept = (rank * mask)[..., None].expand_as(sums)
        by_rank = sums.new_zeros(*mask.shape[:2], view.length + 1, sums.shape[3])
        by_rank.scatter_(2, at_kept, sums * mask[..., None])
        return by_rank.gather(2, kept[..., None].expand_as(sums))

    mass = view.recorded(MASS).double()
    running = (mass * mask).cumsum(dim=2)[..., None]
    num_targets = (rank[..., -1:] - rank).clamp_max(size)
    target_mass = (up_to(running, rank + num_targets) - running)[..., 0]
    merged = (view.numbers() < mass * num_targets / target_mass) & ~mask
    shares = (view.values.float() * (merged / num_targets.clamp_min(1))[..., None]).cumsum(dim=2)
    return Rewritten(values=view.values + shares - up_to(shares, (rank - size).clamp_min(0)))
