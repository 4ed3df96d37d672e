# SPDX-License-Identifier: Apache-2.0
"""A press that changes nothing and shows what layers are called with."""

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
    """Hands every call of a layer to `look`, once its attention has run."""

    look: Callable[[LayerCall], Any]

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        return Recipe(observers=(Wanted(_Looking, self.look),))


class _Looking(Observer):
    def __init__(self, look: Callable[[LayerCall], Any]) -> None:
        self.look = look

    def observe(self, call: LayerCall) -> None:
        self.look(call)
