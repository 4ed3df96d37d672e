# SPDX-License-Identifier: Apache-2.0
"""SCOPE: a budget for generated tokens next to an unchanged prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvpress.core.amount import Schedule
from kvpress.core.checks import Count, check_count
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Allocator, Eviction, Recipe
from kvpress.core.registry import Exemption, Refusal, register
from kvpress.core.scoring import ByScore, Scored
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted
from kvpress.observe.queries import RecentQueries
from kvpress.observe.view import View

Strategy = Literal["slide", "adaptive", "discontinuous"]


@register(
    "scope",
    "schedule",
    "Wu et al., 2024, arXiv:2412.13649",
    example="scope:budget=512",
    refuses=(
        Refusal("scope:budget=100,recent=256", "the recent tokens alone are more than the budget"),
        Refusal("scope + decoding(knorm)", "both would evict generated tokens"),
        Refusal("decoding(scope)", "it has a schedule of its own"),
    ),
    exempt=(Exemption("fuzz", "kept pairs depend on where turns begin; replayed token by token in its own tests"),),
)
@dataclass
class ScopePress(BasePress):
    """Keep the prompt, and of the generated tokens the `recent` newest and those with the most attention of the newest query.

        score[b, h, t] = mean over the query heads of the group of softmax(q_newest . k)[t],   t generated

    The prompt itself can be compressed by another press, as in `snapkv:0.5 + scope`. The `strategy` sets how many generated
    pairs each head keeps, and when it is cut down to that number:

        slide            budget, at every token
        adaptive         min(budget, recent + t // interval) after t generated tokens, at every token
        discontinuous    the same, where t is a multiple of `interval`, so that up to `interval` - 1 more are held in between

    `budget` counts generated pairs, including the `recent` ones. `interval` is the number of generated tokens after which a
    growing budget grows by one. A later turn is a prompt too, and generated pairs from before it are kept.

    Paper: Wu et al., SCOPE: Optimizing Key-Value Cache Compression in Long-context Generation, 2024, arXiv:2412.13649.
    Differs from the paper: pairs are chosen per KV head, by the mean of its query heads; tokens are counted for each
    request, where the authors' code counts those of all layers and requests; `budget` bounds the growing budgets too.
    """

    strategy: Strategy = "slide"
    budget: Count = 512
    recent: Count = 256
    interval: Count = 15

    def validate(self) -> None:
        super().validate()
        check_count("budget", self.budget, least=self.recent)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        share = GeneratedShare(self.strategy, self.budget, self.recent, self.interval)
        every = self.interval if self.strategy == "discontinuous" else 1
        step = Eviction(Generated(self.recent), allocator=share, schedule=Schedule(False, every), fixed=True)
        return Recipe((step,))


class PromptEnd(Observer):
    """Record how many real tokens each row had when its newest prompt or turn was read: `tokens [B]`, int64 on the host."""

    state_names = ("tokens",)
    by_token = True

    def __init__(self) -> None:
        self.tokens: Tensor | None = None

    def observe(self, call: LayerCall) -> None:
        self.end = call.store.seen
        if call.phase == "prefill" or self.tokens is None:
            rows, seen = call.store.batch, call.store.seen
            self.tokens = torch.full((rows,), seen) if call.tokens.mask is None else call.tokens.mask.sum(dim=1).cpu()

    def crop(self, tokens: int) -> None:
        """Remove the newest tokens, which were generated."""
        self.end -= tokens

    def to(self, device: torch.device | str) -> None:
        """Do nothing: counts stay on the host."""


END, NEWEST = Wanted(PromptEnd), Wanted(RecentQueries, 1)


def generated(view: View) -> Tensor:
    """Mark the pairs `[b, h, n]` of generated tokens."""
    end: Tensor = view.observer(END).tokens[view.rows].to(view.positions.device)
    return view.positions >= end[:, None, None]


@dataclass(frozen=True)
class Generated(ByScore):
    """Score the prompt and the `recent` newest tokens highest, then tokens by the attention of the newest query."""

    recent: int
    """Newest tokens that are always kept."""

    wants: ClassVar[tuple[Wanted, ...]] = (END, NEWEST)

    def scores(self, view: View) -> Tensor:
        """Return attention `[b, h, n]`, infinite for pairs that are always kept."""
        attention_weights = view.attention(view.newest_queries(NEWEST))[..., 0, :].mean(dim=2)
        is_kept = ~generated(view) | (view.positions >= view.seen - self.recent)
        return attention_weights.masked_fill(is_kept, torch.inf)


@dataclass(frozen=True)
class GeneratedShare(Allocator):
    """Keep the pairs of the prompt, and as many generated pairs as the strategy allows; see `ScopePress`."""

    strategy: Strategy
    """Whether the budget is constant or grows."""
    budget: int
    """Maximum of generated pairs per head."""
    recent: int
    """Newest tokens that are always kept."""
    interval: int
    """Generated tokens after which a growing budget grows by one."""

    decides = True
    by_head = True

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        return [self._of(item) for item in scored]

    def _of(self, scored: Scored) -> Tensor:
        free, view = generated(scored.view), scored.whole
        num_fixed = generated(view).sum(dim=2) - free.sum(dim=2)
        budget = torch.full((len(view.rows),), self.budget)
        if self.strategy != "slide":
            steps = view.seen - view.observer(END).tokens[view.rows]
            budget = (self.recent + steps // self.interval).clamp_max(self.budget)
        if self.strategy == "discontinuous":
            budget = torch.where(steps % self.interval == 0, budget, steps)
        num_free = (budget.to(num_fixed.device)[:, None] - num_fixed).clamp_min(0)
        return (~free).sum(dim=2) + torch.minimum(free.sum(dim=2), num_free)
