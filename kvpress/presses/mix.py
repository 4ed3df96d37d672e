# SPDX-License-Identifier: Apache-2.0
"""Combine the ranks of two scorers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from kvpress.core.checks import Share
from kvpress.core.compose import protected_by
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, ScorerAround, WrapperPress, Wrapping
from kvpress.core.recipe import Eviction, Recipe
from kvpress.core.registry import Refusal, register
from kvpress.core.scoring import Scored, Scorer
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View
from kvpress.presses.chunkkv import ranks


@register(
    "mix",
    "evict",
    example="mix(leverage_score:0.5; keydiff)",
    cases=("mix(snapkv:0.5,window_size=4; knorm)", "mix(knorm:0.6; keydiff):how=max"),
    refuses=(
        Refusal("mix(knorm:0.5; keydiff:0.5)", "the first press sets the ratio"),
        Refusal("mix(knorm:0.5; kivi)", "a codec has no scores"),
    ),
)
@dataclass
class MixPress(Wrapping):
    """Rank the pairs of a head by two presses, and keep those that rank best by both, or by either.

        rank     score = weight * r + (1 - weight) * r'
        max      score = max(r, r')

    r and r' are the ranks of a pair among the pairs of its head by `press` and by `other`, from 0 to 1. `how` selects one
    of the two scores; `weight` is the weight of the first press in the sum. Pairs that one of the presses always keeps are
    kept. The ratio or budget, its distribution over heads and the schedule are those of `press`.

    Paper: none.
    Differs from the paper: nothing.
    """

    press: BasePress
    other: BasePress
    how: Literal["rank", "max"] = "rank"
    weight: Share = 0.5

    compression_ratio = WrapperPress.compression_ratio

    @property
    def inner(self) -> BasePress:
        return self.press

    def validate(self) -> None:
        if not isinstance(self.other, BasePress):
            raise TypeError(f"{self._requirement}, got {type(self.other).__name__}")
        self.other.validate()
        super().validate()

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        recipe = super().recipe(model)
        return replace(recipe, protected=protected_by((recipe, self.other.recipe(model))))

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        recipe, name = self.other.recipe(model), type(self.other).__name__
        plain = recipe.codec is None and recipe.selector is None and len(recipe.evictions) == 1
        if not plain or recipe.evictions[0].fixed or recipe.evictions[0].compress or recipe.evictions[0].hook:
            raise TypeError(f"{self._requirement}, such as SnapKVPress, got {name}")
        (second,) = recipe.evictions
        for scorer, press in ((step.scorer, self.press), (second.scorer, self.other)):
            if scorer.ranks:
                raise TypeError(
                    f"{type(press).__name__} chooses pairs in a way of its own, which mixed scores would undo"
                )
        extras = recipe.pattern, recipe.dropping, second.prepare, second.among
        if extras != (None,) * 4 or second.rewrites or recipe.hooks or recipe.observers:
            raise TypeError(f"{name} does more than score pairs: give it as the first press, or compose it with `+`")
        if not second.amount.keeps_all or second.allocator.decides:
            raise ValueError(
                f"{type(self.press).__name__} sets how many pairs are kept: leave out the ratio or budget of {name}"
            )
        return replace(
            step,
            scorer=Mixed(step.scorer, second.scorer, self.how, self.weight),
            amount=replace(step.amount, protected=max(step.amount.protected, second.amount.protected)),
            reads_hidden_states=step.reads_hidden_states or second.reads_hidden_states,
        )

    def post_init_from_model(self, model: nn.Module) -> None:
        super().post_init_from_model(model)
        self.other.post_init_from_model(model)


@dataclass(frozen=True)
class Mixed(ScorerAround):
    """Combine the ranks of two scorers into one score; see `MixPress`."""

    other: Scorer
    """Second scorer; the first one is `inner`."""
    how: str
    """`rank` for the weighted sum, `max` for the maximum."""
    weight: float
    """Weight of the first scorer in the sum."""

    ranks: ClassVar[bool] = True

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return tuple(dict.fromkeys((*self.inner.wants, *self.other.wants)))

    def scores(self, view: View) -> Tensor:
        raw = [Scored(view, scorer).scores for scorer in (self.inner, self.other)]
        first, second = (ranks(scores).float() / max(1, view.length - 1) for scores in raw)
        mixed = torch.maximum(first, second) if self.how == "max" else self.weight * first + (1 - self.weight) * second
        return mixed.masked_fill(raw[0].isposinf() | raw[1].isposinf(), torch.inf)

    def without_values(self) -> Mixed:
        return replace(self, inner=self.inner.without_values(), other=self.other.without_values())

    def for_fixed_size(self) -> Mixed:
        return replace(self, inner=self.inner.for_fixed_size(), other=self.other.for_fixed_size())
