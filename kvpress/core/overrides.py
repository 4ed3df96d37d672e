# SPDX-License-Identifier: Apache-2.0
"""What classes that users derive from presses bring: methods written for NVIDIA kvpress, and attributes of their own.

Such a class may override `score`, `compress` or `forward_hook`, and it may call its attributes what this library calls its
properties.
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
    """A property that instances may have an attribute of the same name beside."""

    def __init__(self, part: property) -> None:
        self.part = part

    def __get__(self, press: Any, kind: type | None = None) -> Any:
        if press is None:
            raise AttributeError("a property of instances")  # so that dataclass fields of the name have no default
        return self.part.__get__(press, kind)


def adapt(kind: type) -> None:
    """Prepare a class that is derived: its attributes hide no property of its bases, its methods say what is evicted.

    Raises:
        TypeError: it overrides a method that nothing here asks.
    """
    check_overrides(kind)
    for name in {name for base in kind.__mro__[1:] for name in vars(base)} - vars(kind).keys():
        part = next(vars(base)[name] for base in kind.__mro__ if name in vars(base))
        if isinstance(part, property) and part.fset is None:
            setattr(kind, name, Shadowable(part))
    if {"compress", "forward_hook"} & vars(kind).keys() and "recipe" not in vars(kind):
        kind.recipe = recipe_of_overrides  # type: ignore[attr-defined]


def described(press: Any, name: str) -> Any:
    """Return what a press describes under the name of a property, whatever else it keeps under that name."""
    for base in type(press).__mro__:
        part = vars(base).get(name)
        if isinstance(part, (property, Shadowable)):
            return part.__get__(press, type(press))
    raise AttributeError(f"{type(press).__name__} has no property {name!r}")


def method(press: Any, name: str) -> Callable[..., Any]:
    """Return the method of a press under a name, whatever else it keeps under that name."""
    for base in type(press).__mro__:
        found = vars(base).get(name)
        if inspect.isfunction(found):
            return found.__get__(press)
    raise AttributeError(f"{type(press).__name__} has no method {name!r}")


def own_budget(press: Any) -> int | None:
    """Return the budget of a press; None where a class declares the name anew, for something else."""
    declared = ["budget" in vars(base) or "budget" in inspect.get_annotations(base) for base in type(press).__mro__]
    return press.budget if sum(declared) == 1 else None


def overrides_score(press: Any) -> bool:
    """Whether the class that says most about scores says it with the arguments of NVIDIA kvpress."""
    kinds = type(press).__mro__
    if inspect.isfunction(getattr(type(press), "scores", None)) and "scores" in vars(press):
        return True
    closest = next(base for base in kinds if {"score", "scores"} & _methods(base))
    return "scores" not in _methods(closest)


def _methods(kind: type) -> set[str]:
    return {name for name, found in vars(kind).items() if inspect.isfunction(found)}


def recipe_of_overrides(press: Any, model: ModelFacts | None = None) -> Recipe:
    """Describe a press by the `compress` and `forward_hook` of a user's class, which act in the place of its evictions."""
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
        wants = tuple(dict.fromkeys(wanted for step in steps for wanted in step.wants))
        amount = steps[0].amount if steps else Amount()
        steps = (Eviction(NoScores(wants), amount, hook=press.forward_hook, inside=steps),)
    return replace(recipe, evictions=steps)


def described_recipe(press: Any, model: ModelFacts | None = None) -> Recipe:
    """Return the recipe of a press without the `compress` and `forward_hook` that a user's class brings."""
    for base in type(press).__mro__:
        found = vars(base).get("recipe")
        if found is not None and found is not recipe_of_overrides:
            recipe: Recipe = found(press, model)
            return recipe
    return Recipe()


def _is_overridden(press: Any, name: str) -> bool:
    """Whether some class brings a method of its own in the place of the one that presses have anyway."""
    return sum(name in vars(base) for base in type(press).__mro__) > 1


@dataclass(frozen=True)
class NoScores(ByScore):
    """Stands where a user's own method chooses; it may still ask for what was watched."""

    watched: tuple[Wanted, ...] = ()

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return self.watched

    def scores(self, view: View) -> Tensor:
        raise NotImplementedError("a press with its own `compress` or `forward_hook` has no scores")


@dataclass(frozen=True)
class ScoredByArguments(ByScore):
    """Scores of a press written for NVIDIA kvpress, which may ask its base class for those that `watched` is read for."""

    press: Any
    watched: tuple[Wanted, ...]

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return self.watched

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`; where heads show other tokens, each is scored among all heads at its own."""
        whole, index = view.whole, view.index
        if whole is not None and index is not None and not bool((index == index[:, :1]).all()):
            apart = [whole.pairs(index[:, h : h + 1].expand_as(index)) for h in range(index.shape[1])]
            return torch.stack([self.scores(part)[:, h] for h, part in enumerate(apart)], dim=1)
        scores: Tensor = self.press.score(*score_arguments(view))
        return scores
