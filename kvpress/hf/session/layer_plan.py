# SPDX-License-Identifier: Apache-2.0
"""Plan of one attention layer under a press."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from kvpress.core.recipe import Recipe
from kvpress.core.selector import Selector

if TYPE_CHECKING:
    from kvpress.cache.store import Reader
    from kvpress.core.model import LayerFacts
    from kvpress.observe.call import AttentionLayer, LayerCall


class LayerPlan:
    """Parts of a press that act on one attention layer, resolved once per session."""

    def __init__(self, recipe: Recipe, facts: LayerFacts, layer: AttentionLayer, selector: Selector | None) -> None:
        self.facts = facts
        self.layer = layer
        """Attention layer, as the calls of all passes refer to it."""
        self.rotates: bool | None = None if layer.rotates and not recipe.is_identity else layer.rotates
        """Whether the layer applies a rotary embedding; None before the first call."""
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
        return self.layer.module

    def reader(self, call: LayerCall) -> Reader | None:
        """Return the selector's reader of sealed pairs for a decode step; None reads all pairs."""
        return None if self.selector is None else partial(self.selector.attend, call)
