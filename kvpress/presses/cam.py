# SPDX-License-Identifier: Apache-2.0
"""Evicted values live on in the pairs that follow them."""

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
        Refusal("cam(knorm) + kivi:bits=4", "pairs that are rewritten while tokens are generated must not be sealed"),
    ),
)
@dataclass
class CAMPress(DecodingPress):
    """`DecodingPress` that merges the values it evicts into the next pairs of their head that stay.

        v[j] += x[i] v[i] / m                   for evicted i and the next m kept pairs j behind it
        x[i] ~ Bernoulli(min(1, A[i] / mean of A over these j)),    A[t] = attention that t has received so far

    `merge_budget` is m, of which there are fewer at the end. The numbers that decide are drawn anew for every layer and
    length, the same for all rows and in every run.

    Paper: Zhang et al., CaM: Cache Merging for Memory-efficient LLMs Inference, ICML 2024, PMLR 235.
    Differs from the paper: as in NVIDIA kvpress, everything that leaves after an interval is merged at once and A is a sum
    over queries, where the authors' code merges one token at a time by the newest query alone; unlike there, the sum begins
    with the prompt, heads choose on their own, and the first time all that the prompt has too much is merged.
    """

    merge_budget: Count = 32

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        found = super().recipe(model)
        return replace(found, observers=(*found.observers, MASS))

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        return super().wrap(step, model).rewriting(partial(merge_values, size=self.merge_budget))


def merge_values(view: View, mask: Tensor, size: int) -> Rewritten:
    """Merge values that are not marked into the next `size` marked ones of their head, as far as there are."""
    rank = mask.long().cumsum(dim=2)

    def up_to(sums: Tensor, kept: Tensor) -> Tensor:
        """Running `sums [b, h, n, D]` as they are at each head's kept pairs `[b, h, n]`, which are counted from 1."""
        at_kept = (rank * mask)[..., None].expand_as(sums)
        by_rank = sums.new_zeros(*mask.shape[:2], view.length + 1, sums.shape[3])
        by_rank.scatter_(2, at_kept, sums * mask[..., None])
        return by_rank.gather(2, kept[..., None].expand_as(sums))

    mass = view.recorded(MASS).double()
    running = (mass * mask).cumsum(dim=2)[..., None]
    into = (rank[..., -1:] - rank).clamp_max(size)
    around = (up_to(running, rank + into) - running)[..., 0]
    merged = (view.numbers() < mass * into / around) & ~mask
    given = (view.values.float() * (merged / into.clamp_min(1))[..., None]).cumsum(dim=2)
    return Rewritten(values=view.values + given - up_to(given, (rank - size).clamp_min(0)))
