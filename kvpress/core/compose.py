# SPDX-License-Identifier: Apache-2.0
"""Several recipes as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvpress.core.recipe import Recipe
from kvpress.observe.spans import Spans


def merge(recipes: Sequence[tuple[Any, Recipe]]) -> Recipe:
    """Put the recipes of several presses together; two answers to one question are a ValueError that names the presses."""
    for what, found in (
        ("codec", [press for press, recipe in recipes if recipe.codec is not None]),
        ("selector", [press for press, recipe in recipes if recipe.selector is not None]),
        ("pattern", [press for press, recipe in recipes if recipe.pattern is not None]),
        ("dropping of tokens", [press for press, recipe in recipes if recipe.dropping is not None]),
        (
            "eviction while decoding",
            [press for press, r in recipes for e in r.evictions if e.schedule.every is not None],
        ),
    ):
        if len(found) > 1:
            names = " and ".join(type(press).__name__ for press in found)
            raise ValueError(f"{names} cannot be composed: there can be one {what} for the same pairs")
    generated = [press for press, r in recipes for e in r.evictions if e.rewrite and e.schedule.every is not None]
    sealing = [press for press, recipe in recipes if recipe.codec is not None or recipe.selector is not None]
    if generated and sealing:
        raise ValueError(
            f"{type(generated[0]).__name__} and {type(sealing[0]).__name__} cannot be composed: pairs that are rewritten while "
            "tokens are generated must not be sealed"
        )
    steps = [(press, step) for press, r in recipes for step in r.acting("prefill")]
    refitted = next((place for place, (_, step) in enumerate(steps) if step.refit is not None), len(steps))
    for press, _ in steps[refitted + 1 :]:
        first = type(steps[refitted][0]).__name__
        raise ValueError(
            f"{first} and {type(press).__name__} cannot be composed in this order: what is evicted from refitted pairs takes "
            f"others along with it; put {first} last, or around {type(press).__name__}"
        )
    parts = [recipe for _, recipe in recipes]
    return Recipe(
        evictions=tuple(eviction for part in parts for eviction in part.evictions),
        codec=next((part.codec for part in parts if part.codec is not None), None),
        selector=next((part.selector for part in parts if part.selector is not None), None),
        pattern=next((part.pattern for part in parts if part.pattern is not None), None),
        observers=tuple(wanted for part in parts for wanted in part.observers),
        hooks=tuple(hook for part in parts for hook in part.hooks),
        offloads=any(part.offloads for part in parts),
        protected=protected_by(parts),
        dropping=next((part.dropping for part in parts if part.dropping is not None), None),
    )


def protected_by(recipes: Sequence[Recipe]) -> tuple[Spans, ...]:
    """Return the spans that any of several recipes protects, each once."""
    return tuple(dict.fromkeys(rule for recipe in recipes for rule in recipe.protected))
