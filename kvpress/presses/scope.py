# SPDX-License-Identifier: Apache-2.0
"""A budget for generated tokens beside a prompt that stays as it is."""

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
        Refusal("scope + decoding(knorm)", "there is one eviction of generated tokens"),
        Refusal("decoding(scope)", "it says itself when it acts"),
    ),
    exempt=(
        Exemption("fuzz", "what it keeps hangs on what was read as a turn; replayed token by token in its own tests"),
    ),
)
@dataclass
class ScopePress(BasePress):
    """Keep the pairs of the prompt, and of generated tokens the `recent` newest and those that the newest query attends to.

        score[b, h, t] = mean over the query heads of the group of softmax(q_newest . k)[t],   t generated

    What is left of the prompt is what another press leaves, as in `snapkv:0.5 + scope`. The `strategy` says how many generated
    pairs each head holds, and when it is cut down to them:

        slide            budget, at every token
        adaptive         min(budget, recent + t // interval) behind t generated tokens, at every token
        discontinuous    the same, every `interval` tokens, so that up to `interval` more are held between

    `budget` counts generated pairs, the `recent` ones among them. `interval` is how many tokens widen a growing budget by one.
    A later turn is a prompt too: what it finds stays.

    Paper: Wu et al., SCOPE: Optimizing Key-Value Cache Compression in Long-context Generation, 2024, arXiv:2412.13649.
    Differs from the paper: pairs are chosen per kv head, by the mean of its query heads; tokens are counted for each request,
    where the authors' code counts those of all layers and requests; `budget` bounds the growing budgets too.
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
    """How many real tokens every row had when its newest prompt or turn was read: `tokens [B]`, int64 on the host."""

    held = ("tokens",)
    by_token = True

    def __init__(self) -> None:
        self.tokens: Tensor | None = None

    def observe(self, call: LayerCall) -> None:
        self.end = call.store.seen
        if call.phase == "prefill" or self.tokens is None:
            rows, seen = call.store.batch, call.store.seen
            self.tokens = torch.full((rows,), seen) if call.tokens.mask is None else call.tokens.mask.sum(dim=1).cpu()

    def crop(self, tokens: int) -> None:
        """Forget the newest tokens, none of which is of a prompt."""
        self.end -= tokens

    def to(self, device: torch.device | str) -> None:
        """Counts stay on the host."""


END, NEWEST = Wanted(PromptEnd), Wanted(RecentQueries, 1)


def generated(view: View) -> Tensor:
    """Mark the pairs `[b, h, n]` of tokens that were generated."""
    end = view.observer(END).tokens[view.rows].to(view.positions.device)
    return view.positions >= end[:, None, None]


@dataclass(frozen=True)
class Generated(ByScore):
    """Prefers the prompt, then the `recent` newest tokens, then those that the newest query attends to."""

    recent: int

    wants: ClassVar[tuple[Wanted, ...]] = (END, NEWEST)

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`, infinite where the choice does not hang on attention."""
        paid = view.attention(view.newest_queries(NEWEST))[..., 0, :].mean(dim=2)
        sure = ~generated(view) | (view.positions >= view.seen - self.recent)
        return paid.masked_fill(sure, torch.inf)


@dataclass(frozen=True)
class GeneratedShare(Allocator):
    """Leaves every head its pairs of the prompt, and as many generated ones as a strategy says; see `ScopePress`."""

    strategy: Strategy
    budget: int
    recent: int
    interval: int

    decides = True

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        return [self._of(each) for each in scored]

    def _of(self, each: Scored) -> Tensor:
        free, view = generated(each.view), each.whole
        settled = generated(view).sum(dim=2) - free.sum(dim=2)
        budget = torch.full((len(view.rows),), self.budget)
        if self.strategy != "slide":
            steps = view.seen - view.observer(END).tokens[view.rows]
            budget = (self.recent + steps // self.interval).clamp_max(self.budget)
        left = (budget.to(settled.device)[:, None] - settled).clamp_min(0)
        return (~free).sum(dim=2) + torch.minimum(free.sum(dim=2), left)
