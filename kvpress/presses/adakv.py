# SPDX-License-Identifier: Apache-2.0
"""Head budgets from the scores of any press."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor

from kvpress.core.checks import Share
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, WrapperPress
from kvpress.core.recipe import Allocator, Eviction
from kvpress.core.registry import Refusal, register
from kvpress.core.scoring import Scored, top


@register(
    "adakv",
    "budget",
    "Feng et al., 2024, arXiv:2407.11550",
    example="adakv(snapkv:0.5)",
    cases=("adakv(snapkv:0.5,window_size=4)", "adakv(expected_attention:0.7)"),
    refuses=(Refusal("adakv(chunkkv(snapkv:0.5))", "both would choose the pairs to keep"),),
)
@dataclass
class AdaKVPress(WrapperPress):
    """Keep the best pairs of all heads of a layer together, so that heads differ in length.

    Each head keeps at least the share `alpha_safeguard` of the mean budget, and one pair unless the share is 0. Where the pairs
    that the inner press always keeps, such as a window, are more than the budget, heads do not compete: they keep equally many
    of these pairs, the newest. Storage is ragged, so evicted pairs free memory.

    Paper: Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation, 2024, arXiv:2407.11550.
    Differs from the paper: the safeguard keeps each head's best pairs before the competition, as in NVIDIA kvpress; the
    authors' code interpolates budgets instead.
    """

    press: BasePress
    alpha_safeguard: Share = 0.20

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        self.check_choice(step)
        inner = step.allocator
        return replace(step, allocator=Competition(inner, self.alpha_safeguard, scope=inner.scope))


@dataclass(frozen=True)
class Competition(Allocator):
    """Allocator that adds up the budgets of all heads from `inner`, and keeps the best pairs of all heads together.

    If `inner` shares pairs out among layers, the heads of each layer compete for the budget of that layer only.
    """

    inner: Allocator = field(default_factory=Allocator)
    """Allocator of the budgets before the competition."""
    safeguard: float = 0.0
    """Share of its inner budget that each head keeps in any case."""

    ragged = True

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        budgets = self.inner.counts(scored, mean)
        if self.inner.scope == "layer":
            return self._compete(scored, budgets)
        layers = groupby(zip(scored, budgets, strict=True), key=lambda item: item[0].view.layer)
        return [count for _, layer in layers for count in self._compete(*zip(*layer, strict=True))]

    def within_layers(self) -> Allocator:
        return replace(self, scope="layer", inner=self.inner.within_layers())

    def _compete(self, scored: Sequence[Scored], budgets: Sequence[int | Tensor]) -> list[int | Tensor]:
        """Return the number of pairs of each head, `[b, h]` for each item of `scored`, in one competition."""
        scores = []
        for item, count in zip(scored, budgets, strict=True):
            minimum = at_least_one(count, self.safeguard)
            scores.append(item.scores.masked_fill(top(item.scores, minimum), torch.inf))
        flat, total = torch.cat([score.flatten(1) for score in scores], dim=1), _total(budgets, scores)
        mask = top(flat, total)
        is_crowded = flat.isposinf().sum(dim=1) > total
        if bool(is_crowded.any()):  # a tie of infinite scores would go to the last heads
            newest_first = torch.cat([_newest_first(score.isposinf()).flatten(1) for score in scores], dim=1)
            mask = torch.where(is_crowded[:, None], top(newest_first, total), mask)
        masks = mask.split([score[0].numel() for score in scores], dim=1)
        return [kept.view(score.shape).sum(dim=2) for kept, score in zip(masks, scores, strict=True)]

    def keeps_all(self, lengths: Sequence[int], mean: int) -> bool:
        return self.inner.keeps_all(lengths, mean)

    def planned(self, tokens: int, mean: int) -> int:
        return self.inner.planned(tokens, mean)


def at_least_one(count: int | Tensor, share: float) -> int | Tensor:
    """Return a share of a number of pairs, rounded down, but not to 0 unless the share or the number is 0."""
    least = 1 if share else 0
    if isinstance(count, int):
        return min(count, max(least, int(count * share)))
    return torch.minimum(count, (count * share).long().clamp_min(least))


def _newest_first(fixed: Tensor) -> Tensor:
    """Return the scores `[b, h, n]` by which heads keep equally many of the pairs marked in `fixed`, the newest of each."""
    newer = fixed.flip(-1).cumsum(dim=-1).flip(-1)
    return (-newer).double().masked_fill(~fixed, -torch.inf)


def _total(counts: Sequence[int | Tensor], scores: Sequence[Tensor]) -> int | Tensor:
    """Return the number of pairs of all heads together: an integer, or `[b]` with one for each row."""
    if all(isinstance(count, int) for count in counts):
        return sum(int(count) * score.shape[1] for count, score in zip(counts, scores, strict=True))
    rows = torch.zeros(scores[0].shape[0], dtype=torch.int64, device=scores[0].device)
    for count, score in zip(counts, scores, strict=True):
        rows += count * score.shape[1] if isinstance(count, int) else count.sum(dim=1)
    return rows
