# SPDX-License-Identifier: Apache-2.0
"""Presses that can compress the pairs around a block."""

from __future__ import annotations

from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Eviction, Recipe
from kvpress.observe.queries import RecentQueries


def recipe_around(press: BasePress, facts: ModelFacts, block_length: int) -> Recipe:
    """Return the recipe of a press that needs only keys, values and the block's queries.

    Raises:
        ValueError: the press scores by fewer queries than a block has.
        NotImplementedError: the press needs more; the message names it.
    """
    press.validate()
    recipe = press.recipe(facts)
    obstacle = next((obstacle for step in recipe.evictions if (obstacle := _needs(step))), None) or _obstacle(recipe)
    if obstacle is not None:
        raise NotImplementedError(
            f"{type(press).__name__} cannot compress the pairs around a block: it {obstacle}. Use presses that score by keys, "
            "values or the newest queries, such as sparse_dllm, snapkv or knorm, and codecs such as kivi"
        )
    for observer in recipe.watched("prefill"):
        size = observer.make().size
        if size < block_length:
            raise ValueError(
                f"{type(press).__name__} scores by {size} queries, fewer than the {block_length} of a block: set the press to "
                f"{block_length} queries, or use block_length={size}"
            )
    return recipe


def _obstacle(recipe: Recipe) -> str | None:
    """Return why a recipe does not work around a block; None if it does."""
    if recipe.selector is not None or recipe.pattern is not None:
        return "chooses the pairs that tokens of a causal model read"
    if recipe.dropping is not None:
        return "drops tokens of a prompt between the layers of a causal model"
    if recipe.hooks or recipe.offloads:
        return "acts after passes of a causal model"
    if recipe.joint:
        return "encodes several layers together, after the last of them"
    if recipe.protected:
        return "protects spans of a prompt"
    observers = [o.kind.__name__ for o in recipe.watched("prefill") if o.kind is not RecentQueries]
    return f"observes passes of a causal model ({', '.join(sorted(set(observers)))})" if observers else None


def _needs(step: Eviction) -> str | None:
    """Return why an eviction does not work around a block; None if it does."""
    if step.compress is not None or step.hook is not None:
        return "overrides `compress` or `forward_hook`"
    if step.prepare is not None or step.refit is not None or step.allocator.scope == "cache":
        return "needs all layers, or a complete prompt, before it chooses"
    if step.among is not None or step.schedule.every is not None or step.schedule.chunk is not None:
        return "evicts during decoding, or between the chunks of a prompt"
    if step.rewrite is not None:
        return "changes the kept pairs by the order in which they were read"
    return None
