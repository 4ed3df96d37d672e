# SPDX-License-Identifier: Apache-2.0
"""What one attention layer does under a press."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvpress.cache.attention import group_queries
from kvpress.core.recipe import Recipe
from kvpress.core.selector import Selector
from kvpress.hf.attention.functions import asked
from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.models import cache_place

if TYPE_CHECKING:
    from kvpress.cache.store import Reader
    from kvpress.core.model import LayerFacts
    from kvpress.observe.call import LayerCall


class LayerPlan:
    """What one attention layer does under a press: the same in every pass, so it is worked out once per session.

    `depth` counts the layers before it whose caches grow; `following` is the next such layer's plan where that layer's selector
    looks ahead.
    """

    def __init__(self, recipe: Recipe, facts: LayerFacts, depth: int, selector: Selector | None) -> None:
        self.facts = facts
        self.depth = depth
        self.codec = recipe.codec_at(facts.index)
        self.selector = selector
        self.pattern = None if recipe.pattern is None else recipe.pattern(facts.index)
        self.following: LayerPlan | None = None
        self.tiles: int | None = None

    def reader(self, call: LayerCall) -> Reader | None:
        """Return what a decode step reads sealed pairs with; None reads them all."""
        return None if self.selector is None else partial(self.selector.attend, call)

    def look_ahead(self, call: LayerCall) -> None:
        """Tell the next layer's selector what that layer will ask, as far as this layer's input says."""
        if self.following is None or self.following.selector is None:
            return
        module = self.following.facts.module
        assert module is not None  # noqa: S101 - layers of a session are those of a model
        layer = call.cache.layers[cache_place(module)]
        if isinstance(layer, PressLayer) and layer.store is not None:
            queries = asked(module, call.hidden_states, call.kwargs).queries
            self.following.selector.prefetch(layer.store, group_queries(queries, layer.store.heads))
