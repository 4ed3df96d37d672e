# SPDX-License-Identifier: Apache-2.0
"""Support for users' subclasses of presses: methods written for NVIDIA kvpress, and attributes named like properties.

Such a class may override `score`, `compress` or `forward_hook`. It may also give an attribute the name of a property of this
library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvpress.core.amount import Amount
from kvpress.core.helpers import check_overrides
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Allocator, Eviction, Recipe
from kvpress.core.scoring import ByScore
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View, score_arguments


class Shadowable:
    """Read-only property that an attribute of the same name may hide on an instance."""

    def __init__(self, wrapped: property) -> None:
        self.wrapped = wrapped

    def __get__(self, press: Any, kind: type | None = None) -> Any:
        if press is None:
            raise AttributeError("a property of instances")  # a dataclass field of this name must get no default
        return self.wrapped.__get__(press, kind)


def adapt(kind: type) -> None:
    """Prepare a subclass of a press: let its attributes hide properties, and build its recipe from its overrides.

    Raises:
        TypeError: the class overrides a method that this library never calls.
    """
    check_overrides(kind)
    for name in {name for base in kind.__mro__[1:] for name in vars(base)} - vars(kind).keys():
        attribute = next(vars(base)[name] for base in kind.__mro__ if name in vars(base))
        if isinstance(attribute, property) and attribute.fset is None:
            setattr(kind, name, Shadowable(attribute))
    if {"compress", "forward_hook"} & vars(kind).keys() and "recipe" not in vars(kind):
        kind.recipe = recipe_of_overrides  # type: ignore[attr-defined]


def described(press: Any, name: str) -> Any:
    """Return the value of a property of a press, even if an attribute of that name hides it."""
    for base in type(press).__mro__:
        attribute = vars(base).get(name)
        if isinstance(attribute, (property, Shadowable)):
            return attribute.__get__(press, type(press))
    raise AttributeError(f"{type(press).__name__} has no property {name!r}")


def method(press: Any, name: str) -> Callable[..., Any]:
    """Return a method of a press by name, even if an attribute of that name hides it."""
    for base in type(press).__mro__:
        function = vars(base).get(name)
        if inspect.isfunction(function):
            return function.__get__(press)
    raise AttributeError(f"{type(press).__name__} has no method {name!r}")


def own_budget(press: Any) -> int | None:
    """Return the budget of a press; None if a subclass declares an attribute of that name for another purpose."""
    declared = ["budget" in vars(base) or "budget" in inspect.get_annotations(base) for base in type(press).__mro__]
    return press.budget if sum(declared) == 1 else None


def overrides_score(press: Any) -> bool:
    """Whether the most derived class with `score` or `scores` defines `score`, with the arguments of NVIDIA kvpress."""
    kinds = type(press).__mro__
    if inspect.isfunction(getattr(type(press), "scores", None)) and "scores" in vars(press):
        return True
    closest = next(base for base in kinds if {"score", "scores"} & _methods(base))
    return "scores" not in _methods(closest)


def _methods(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if inspect.isfunction(value)}


def recipe_of_overrides(press: Any, model: ModelFacts | None = None) -> Recipe:
    """Return the recipe of a user's class, with its `compress` or `forward_hook` in place of the evictions."""
    recipe = described_recipe(press, model)
    steps = recipe.evictions
    if _is_overridden(press, "compress"):
        first = steps[0] if steps else Eviction(NoScores())
        steps = (
            replace(
                first, compress=press.compress, reads_hidden_states=True,
                allocator=Allocator(), rewrite=None, prepare=None, recent=0.0, refit=None,
            ),
        )  # fmt: skip
    if _is_overridden(press, "forward_hook"):
        wants = tuple(dict.fromkeys(item for step in steps for item in step.wants))
        amount = steps[0].amount if steps else Amount()
        steps = (Eviction(NoScores(wants), amount, hook=press.forward_hook, inside=steps),)
    return replace(recipe, evictions=steps)


def described_recipe(press: Any, model: ModelFacts | None = None) -> Recipe:
    """Return the recipe of a press without the `compress` and `forward_hook` of a user's class."""
    for base in type(press).__mro__:
        describe = vars(base).get("recipe")
        if describe is not None and describe is not recipe_of_overrides:
            recipe: Recipe = describe(press, model)
            return recipe
    return Recipe()


def _is_overridden(press: Any, name: str) -> bool:
    """Whether a subclass overrides a method of the base class."""
    return sum(name in vars(base) for base in type(press).__mro__) > 1


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
