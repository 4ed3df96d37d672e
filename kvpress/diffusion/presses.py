# SPDX-License-Identifier: Apache-2.0
"""Which presses can decide what is held around a block."""

from __future__ import annotations

from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Eviction, Recipe
from kvpress.observe.queries import RecentQueries


def recipe_around(press: BasePress, facts: ModelFacts, block_length: int) -> Recipe:
    """Return the recipe of a press that evicts and encodes by what a block shows: keys, values and the block's queries.

    Raises:
        ValueError: it listens to fewer queries than a block has.
        NotImplementedError: it needs more; says what.
    """
    press.validate()
    recipe = press.recipe(facts)
    why = next((why for step in recipe.evictions if (why := _needs(step))), None) or _obstacle(recipe)
    if why is not None:
        raise NotImplementedError(
            f"{type(press).__name__} cannot decide what is held around a block: it {why}. Use presses that score by keys, "
            "values or the newest queries, such as sparse_dllm, snapkv or knorm, and codecs such as kivi"
        )
    for wanted in recipe.watched("prefill"):
        size = wanted.make().size
        if size < block_length:
            raise ValueError(
                f"{type(press).__name__} scores by {size} queries, and a block has {block_length}, all of which should count: "
                f"let the press take {block_length}, or use block_length={size}"
            )
    return recipe


def _obstacle(recipe: Recipe) -> str | None:
    if recipe.selector is not None or recipe.pattern is not None:
        return "chooses what single tokens read from left to right"
    if recipe.hooks or recipe.offloads:
        return "acts after whole passes of a causal model"
    if recipe.protected:
        return "protects spans of a prompt"
    watched = [wanted.kind.__name__ for wanted in recipe.watched("prefill") if wanted.kind is not RecentQueries]
    return f"watches the reading of a causal model ({', '.join(sorted(set(watched)))})" if watched else None


def _needs(step: Eviction) -> str | None:
    if step.compress is not None or step.hook is not None:
        return "has a `compress` or `forward_hook` of its own"
    if step.prepare is not None or step.refit is not None or step.allocator.scope == "cache":
        return "looks at all layers, or at a prompt, before it chooses"
    if step.among is not None or step.schedule.every is not None or step.schedule.chunk is not None:
        return "evicts while tokens are generated or a prompt is read in parts"
    if step.rewrite is not None:
        return "changes the pairs that stay, by the order in which they were read"
    return None
