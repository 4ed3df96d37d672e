# SPDX-License-Identifier: Apache-2.0
"""Plan of one attention layer under a press."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from kvpress.core.recipe import Recipe
from kvpress.core.selector import Selector
from kvpress.hf.models import cache_place

if TYPE_CHECKING:
    from kvpress.cache.store import Reader
    from kvpress.core.model import LayerFacts
    from kvpress.observe.call import LayerCall


class LayerPlan:
    """Parts of a press that act on one attention layer, resolved once per session."""

    def __init__(self, recipe: Recipe, facts: LayerFacts, depth: int, selector: Selector | None) -> None:
        self.facts = facts
        self.depth = depth
        """Number of earlier layers whose caches grow."""
        self.codec = recipe.codec_at(facts.index)
        self.selector = selector
        self.pattern = None if recipe.pattern is None else recipe.pattern(facts.index)
        self.following: LayerPlan | None = None
        """Plan of the next growing layer, if its selector prefetches."""
        self.tiles: int | None = None
        """Repetitions of the sequence of KV heads in the attention's keys; None before the first call."""

    @property
    def module(self) -> nn.Module:
        """Attention module of the layer."""
        module = self.facts.module
        assert module is not None  # noqa: S101 - layers of a session are those of a model
        return module

    @property
    def cache_index(self) -> int:
        """Index of the cache layer that the attention module writes."""
        return cache_place(self.module)

    def reader(self, call: LayerCall) -> Reader | None:
        """Return the selector's reader of sealed pairs for a decode step; None reads all pairs."""
        return None if self.selector is None else partial(self.selector.attend, call)
