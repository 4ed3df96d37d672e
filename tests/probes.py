# SPDX-License-Identifier: Apache-2.0
"""A press that changes nothing and passes every attention call to a function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kvpress
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted


@dataclass
class Watching(kvpress.BasePress):
    """Passes every call of a layer to `look`, after its attention."""

    look: Callable[[LayerCall], Any]

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        return Recipe(observers=(Wanted(_Looking, self.look),))


class _Looking(Observer):
    def __init__(self, look: Callable[[LayerCall], Any]) -> None:
        self.look = look

    def observe(self, call: LayerCall) -> None:
        self.look(call)
