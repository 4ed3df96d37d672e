# SPDX-License-Identifier: Apache-2.0
"""Base of presses around a selector: they change the choice of another selector."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from kvpress.cache.codec import Codec
from kvpress.cache.store import KVStore
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.selector import Budget, Selector


@dataclass
class SelectorWrapperPress(BasePress):
    """Base of presses around a selector."""

    press: BasePress

    @abstractmethod
    def around(self, selector: Selector) -> Selector:
        """Return the selector that takes the place of an inner one."""
        raise NotImplementedError(f"{type(self).__name__} must override `around`")

    def validate(self) -> None:
        super().validate()
        if not isinstance(self.press, BasePress):
            raise TypeError(
                f"{type(self).__name__} needs a selector, such as QuestPress(budget=1024), got {type(self.press).__name__}"
            )
        self.press.validate()
        self.recipe()

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        inner, name, wrapper = self.press.recipe(model), type(self.press).__name__, type(self).__name__
        choose = inner.selector
        if choose is None or inner.codec is not None or inner.evictions or inner.offloads or inner.dropping is not None:
            raise TypeError(
                f"{wrapper} needs a selector alone, such as QuestPress(budget=1024), got {name}; write presses that evict, "
                "drop tokens, encode or offload outside of it"
            )

        def at(layer: int) -> Selector | None:
            selector = choose(layer)
            if selector is None:
                return None
            if selector.adds or type(selector).after is not Selector.after:
                reason = (
                    "adds an estimate of the unread pairs" if selector.adds else "needs layers that read everything"
                )
                raise TypeError(f"{wrapper} cannot change the choice of {name}, which {reason}")
            return self.around(selector)

        if model is not None:
            for layer in model.growing:
                at(layer.index)
        return Recipe(selector=at, pattern=inner.pattern, observers=inner.observers, hooks=inner.hooks)


class SelectorAround(Selector):
    """Base of selectors that change the choice of an inner one, with its index and its tiles.

    Args:
        inner: the inner selector.
        score_bytes: temporary memory per pair, in addition to that of the inner selector, in bytes.
    """

    def __init__(self, inner: Selector, score_bytes: int) -> None:
        self.inner = inner
        # Sinks and recent pairs of the inner selector are always read, also through several wrappers.
        self.budget: Budget | None = getattr(inner, "budget", None)
        self.unit, self.score_bytes = inner.unit, inner.score_bytes + inner.unit * score_bytes

    @property
    def sealing(self) -> Codec:  # type: ignore[override]
        """Sealing of the inner selector."""
        return self.inner.sealing

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        return self.inner.index_bytes(pairs, dim, dtype)

    def prepare(self, store: KVStore) -> None:
        self.inner.prepare(store)
