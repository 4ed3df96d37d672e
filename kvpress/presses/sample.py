# SPDX-License-Identifier: Apache-2.0
"""Spend a share of the budget on a random sample of the remaining pairs, weighted to stand for all of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.core.checks import Share, Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, ScorerAround, WrapperPress
from kvpress.core.recipe import Eviction
from kvpress.core.registry import Refusal, register
from kvpress.core.scoring import Scored, top


@register(
    "sample",
    "evict",
    example="sample(knorm:0.5):share=0.25",
    cases=("sample(knorm:0.5)", "sample(adakv(snapkv:0.5,window_size=4)):share=0.5,seed=2"),
    refuses=(
        Refusal(
            "chunk(sample(knorm:0.5))", "it weighs by what it leaves of all pairs; `sample(chunk(knorm:0.5))` samples"
        ),
        Refusal("adakv(sample(knorm:0.5))", "both would choose the pairs to keep; `sample(adakv(knorm:0.5))` samples"),
    ),
)
@dataclass
class SamplePress(WrapperPress):
    """Keep the best pairs of another press, and a uniform sample that stands for the remaining ones.

        of k kept pairs of n:   the k - m best, and m = round(share k) drawn without replacement from the n - k + m
                                remaining ones, each with log((n - k + m) / m) added to its logit

    The sample is an unbiased estimate of the softmax mass of the remaining pairs, which eviction alone treats as 0. `share`
    is the sampled share of the budget. Draws depend only on `seed`, layer, length, head and position.

    Paper: none; the weights are those of Horvitz & Thompson, 1952.
    Differs from the paper: nothing.
    """

    press: BasePress
    share: Share = 0.25
    seed: Size = 0

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        if step.scorer.weighs:
            raise TypeError(
                f"{type(self).__name__} and {type(self.inner).__name__} would both weigh pairs; use one of them"
            )
        return replace(step, scorer=Sampling(step.scorer, self.share, self.seed))


@dataclass(frozen=True)
class Sampling(ScorerAround):
    """Keep the best pairs of the inner scorer, and a weighted sample of the remaining ones."""

    share: float
    """Share of the kept pairs that is sampled."""
    seed: int
    """Random seed."""

    ranks: ClassVar[bool] = True
    weighs: ClassVar[bool] = True

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        view = scored.view
        num_kept = torch.as_tensor(counts, device=view.positions.device).expand(view.shape[:2])
        num_sampled = (num_kept * self.share).round().long()
        best = self.inner.choose(
            scored, counts - int(num_sampled[0, 0]) if isinstance(counts, int) else num_kept - num_sampled
        )
        num_remaining = (~best).sum(dim=2)
        sample = top(view.numbers(self.seed).masked_fill(best, -torch.inf), num_sampled)
        log_weight = (num_remaining / num_sampled.clamp_min(1)).log()
        scored.log_weight = (sample * log_weight[..., None]).half()
        return best | sample
