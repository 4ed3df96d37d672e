# SPDX-License-Identifier: Apache-2.0
"""A part of the budget goes to pairs drawn from those that a scorer leaves out, each with the weight of all it stands for."""

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
    """Keep the best pairs of another press, and a uniform sample of the others that stands for all of them.

        of k pairs that stay of n:   the k - m best, and m = round(share k) that are drawn without replacement from the
                                     n - k + m others, each with log((n - k + m) / m) added to its logits

    So what is ordinary is not lost: the sum of softmax weights over the pairs left out is estimated without bias, where
    eviction alone takes it for 0. `share` is the sampled part of the budget. Draws depend on `seed`, layer, length, head and
    position only.

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
    """Draws the share `share` of what stays from the pairs that the inner scorer would not choose."""

    share: float
    seed: int

    ranks: ClassVar[bool] = True
    weighs: ClassVar[bool] = True

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        view = scored.view
        kept = torch.as_tensor(counts, device=view.positions.device).expand(view.shape[:2])
        drawn = (kept * self.share).round().long()
        best = self.inner.choose(scored, counts - int(drawn[0, 0]) if isinstance(counts, int) else kept - drawn)
        rest = (~best).sum(dim=2)
        sample = top(view.numbers(self.seed).masked_fill(best, -torch.inf), drawn)
        weight = (rest / drawn.clamp_min(1)).log()
        scored.log_weight = (sample * weight[..., None]).half()
        return best | sample
