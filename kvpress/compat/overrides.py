# SPDX-License-Identifier: Apache-2.0
"""Subclasses of presses that were written for NVIDIA kvpress: overrides of `score`, `compress`, `forward_hook` and helpers."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvpress.compat.methods import HELPERS, UNUSED, Helper
from kvpress.core.amount import Amount
from kvpress.core.checks import is_ours
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Allocator, Eviction, Recipe
from kvpress.core.scoring import ByScore
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View, score_arguments


def adapt(kind: type[Any]) -> None:
    """Attach helpers to a press class of this library; make a user's class call its `score`, `compress` or `forward_hook`.

    Raises:
        TypeError: the class overrides a method that is never called here, or has its own `recipe` besides.
    """
    for helper in HELPERS.get(kind.__name__, ()) if is_ours(kind) else ():
        setattr(kind, helper.name, helper)
    check_helpers(kind)
    declares_budget = "budget" in {*vars(kind), *inspect.get_annotations(kind)}
    if declares_budget and hasattr(kind, "num_kept") and "num_kept" not in vars(kind):
        kind.num_kept = None
    if overrides_score(kind):
        kind.with_user_score = with_user_score
    names = [name for name in ("compress", "forward_hook") if is_overridden(kind, name)]
    if names and "recipe" in vars(kind):
        raise TypeError(
            f"{kind.__name__} has its own `recipe`, which alone decides what is evicted, so its {names[0]!r} would never be "
            "called: define one of them only"
        )
    if names:
        kind.recipe = recipe_of_overrides


def is_overridden(kind: type, name: str) -> bool:
    """Whether a method of a press is defined by a base class, and again by a class derived from that one."""
    return sum(name in vars(base) for base in kind.__mro__) > 1


def overrides_score(kind: type) -> bool:
    """Whether the most derived class with `score` or `scores` overrides `score`, with the arguments of NVIDIA kvpress."""
    closest = next((base for base in kind.__mro__ if {"score", "scores"} & vars(base).keys()), kind)
    is_plain = "scores" not in vars(closest) and not isinstance(vars(closest).get("score"), Helper)
    return is_plain and is_overridden(kind, "score")


def check_helpers(kind: type, called: str = "") -> None:
    """Check that a class overrides no method of NVIDIA kvpress that this library never calls.

    A class may define such a method if it also overrides the `score` or `compress` that calls it. `called` is the method of
    the base class that such an override has called nevertheless, and which would ignore the method.

    Raises:
        TypeError: the class overrides such a method; the message names it.
    """
    for base in filter(is_ours, kind.__mro__):
        callers: dict[str, tuple[str, ...]] = dict.fromkeys(UNUSED.get(base.__name__, ()), ())
        callers |= {helper.name: helper.callers for helper in HELPERS.get(base.__name__, ()) if not helper.overridable}
        for name, methods in callers.items():
            methods = (*methods, "compress")
            definition = _users_class(kind, name)
            is_called = not called and any(_users_class(kind, method) for method in methods)
            if definition is not None and not is_called:
                raise TypeError(
                    f"{definition.__name__} overrides {name!r}, which {base.__name__} has in NVIDIA kvpress and never calls "
                    f"here{f', also not in its {called!r}' if called else ''}: override {' or '.join(map(repr, methods))} "
                    "and return the result from there, or give the method another name"
                )


def _users_class(kind: type, name: str) -> type | None:
    """Return the user's class that an attribute of `kind` is defined in; None if this library defines it, or nothing."""
    definition = next((base for base in kind.__mro__ if name in vars(base)), None)
    return None if definition is None or is_ours(definition) else definition


def with_user_score(press: Any, step: Eviction) -> Eviction:
    """Return the eviction of a press with a user's `score` as its scorer."""
    if not overrides_score(type(press)):  # a class derived from the user's may override `scores`
        return step
    return replace(step, scorer=ScoredByArguments(press, step.scorer.wants), reads_hidden_states=True)


def recipe_of_overrides(press: Any, model: ModelFacts | None = None) -> Recipe:
    """Return the recipe of a user's class, with its `compress` or `forward_hook` in place of the evictions."""
    recipe = described_recipe(press, model)
    steps = recipe.evictions
    if is_overridden(type(press), "compress"):
        first = steps[0] if steps else Eviction(NoScores())
        steps = (
            replace(
                first, compress=press.compress, reads_hidden_states=True,
                allocator=Allocator(), rewrite=None, prepare=None, recent=0.0, refit=None,
            ),
        )  # fmt: skip
    if is_overridden(type(press), "forward_hook"):
        wants = tuple(dict.fromkeys(item for step in steps for item in step.wants))
        amount = steps[0].amount if steps else Amount()
        steps = (Eviction(NoScores(wants), amount, hook=press.forward_hook, inside=steps),)
    return replace(recipe, evictions=steps)


def described_recipe(press: Any, model: ModelFacts | None = None) -> Recipe:
    """Return the recipe of a press without the `compress` and `forward_hook` of a user's class."""
    recipes = (vars(base)["recipe"] for base in type(press).__mro__ if "recipe" in vars(base))
    recipe: Recipe = next(describe for describe in recipes if describe is not recipe_of_overrides)(press, model)
    return recipe


@dataclass(frozen=True)
class NoScores(ByScore):
    """Placeholder scorer for a press whose `compress` or `forward_hook` chooses the pairs."""

    watched: tuple[Wanted, ...] = ()
    """Observers that the method may read."""

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return self.watched

    def scores(self, view: View) -> Tensor:
        raise NotImplementedError("a press with its own `compress` or `forward_hook` has no scores")


@dataclass(frozen=True)
class ScoredByArguments(ByScore):
    """Scorer that calls `score` of a press written for NVIDIA kvpress."""

    press: Any
    """Press with the method `score`."""
    watched: tuple[Wanted, ...]
    """Observers that `score` of the base class reads."""

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return self.watched

    def scores(self, view: View) -> Tensor:
        """Return scores `[b, h, n]`; heads that show different tokens are scored one by one."""
        complete, index = view.whole, view.index
        if complete is not None and index is not None and not bool((index == index[:, :1]).all()):
            # `score` gets one set of tokens for all heads, so each call uses the tokens of one head, and its scores only.
            views = [complete.pairs(index[:, h : h + 1].expand_as(index)) for h in range(index.shape[1])]
            return torch.stack([self.scores(same_tokens)[:, h] for h, same_tokens in enumerate(views)], dim=1)
        scores: Tensor = self.press.score(*score_arguments(view))
        return scores
