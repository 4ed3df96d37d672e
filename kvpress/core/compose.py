# SPDX-License-Identifier: Apache-2.0
"""Composition of the recipes of several presses into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpress.core.recipe import Recipe
from kvpress.observe.spans import SpanRule


def merge(recipes: Sequence[tuple[Any, Recipe]]) -> Recipe:
    """Return the recipe of several presses together.

    Raises:
        ValueError: two presses bring the same kind of part, or cannot work together in this order; the message names them.
    """
    for kind, owners in (
        ("codec", [press for press, recipe in recipes if recipe.codec is not None]),
        ("selector", [press for press, recipe in recipes if recipe.selector is not None]),
        ("pattern", [press for press, recipe in recipes if recipe.pattern is not None]),
        ("dropping of tokens", [press for press, recipe in recipes if recipe.dropping is not None]),
        (
            "eviction while decoding",
            [press for press, r in recipes for e in r.evictions if e.schedule.every is not None],
        ),
    ):
        if len(owners) > 1:
            names = " and ".join(type(press).__name__ for press in owners)
            raise ValueError(f"{names} cannot be composed: there can be one {kind} for the same pairs")
    generated = [press for press, r in recipes for e in r.evictions if e.rewrite and e.schedule.every is not None]
    sealing = [press for press, recipe in recipes if recipe.codec is not None or recipe.selector is not None]
    if generated and sealing:
        raise ValueError(
            f"{type(generated[0]).__name__} and {type(sealing[0]).__name__} cannot be composed: pairs that are rewritten while "
            "tokens are generated must not be sealed"
        )
    steps = [(press, step) for press, r in recipes for step in r.acting("prefill")]
    refitted = next((index for index, (_, step) in enumerate(steps) if step.refit is not None), len(steps))
    for press, _ in steps[refitted + 1 :]:
        first = type(steps[refitted][0]).__name__
        raise ValueError(
            f"{first} and {type(press).__name__} cannot be composed in this order: {first} fits values to "
            f"all pairs that it keeps, and a later eviction removes some; put {first} last, or around {type(press).__name__}"
        )
    parts = [recipe for _, recipe in recipes]
    return Recipe(
        evictions=tuple(eviction for recipe in parts for eviction in recipe.evictions),
        codec=next((recipe.codec for recipe in parts if recipe.codec is not None), None),
        joint=any(recipe.joint for recipe in parts),
        selector=next((recipe.selector for recipe in parts if recipe.selector is not None), None),
        pattern=next((recipe.pattern for recipe in parts if recipe.pattern is not None), None),
        observers=tuple(item for recipe in parts for item in recipe.observers),
        hooks=tuple(hook for recipe in parts for hook in recipe.hooks),
        offloads=any(recipe.offloads for recipe in parts),
        protected=protected_by(parts),
        dropping=next((recipe.dropping for recipe in parts if recipe.dropping is not None), None),
    )


def protected_by(recipes: Sequence[Recipe]) -> tuple[SpanRule, ...]:
    """Return the spans that any of the recipes protects, without duplicates."""
    return tuple(dict.fromkeys(rule for recipe in recipes for rule in recipe.protected))
