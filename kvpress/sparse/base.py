# SPDX-License-Identifier: Apache-2.0
"""Base of presses that select: a budget of pairs to read."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

from kvpress.core.checks import Size, check_count
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.selector import Budget, Selector


@dataclass
class SelectorPress(BasePress):
    """Base of presses that keep every pair and read about `budget` sealed pairs of each head for every new token.

    `budget` is a number of pairs, or a fraction in (0, 1) of the stored ones. The oldest `n_sink` and the newest `n_recent`
    sealed pairs are always read, as a part of the budget. Pairs that are not sealed yet are read in addition.
    """

    budget: float = 1024
    n_sink: Size = field(default=0, kw_only=True)
    n_recent: Size = field(default=0, kw_only=True)

    def validate(self) -> None:
        super().validate()
        if isinstance(self.budget, float):
            if not 0 < self.budget < 1:
                raise ValueError(
                    f"budget must be an integer number of pairs, or a fraction in (0, 1), got {self.budget}"
                )
            return
        check_count("budget", self.budget)
        if self.budget < self.n_sink + self.n_recent:
            raise ValueError(
                f"budget must be >= {self.n_sink + self.n_recent}, got {self.budget}: n_sink={self.n_sink} oldest and "
                f"n_recent={self.n_recent} newest pairs are a part of it; raise budget, or lower one of them"
            )

    @property
    def limits(self) -> Budget:
        """Budget with the sinks and recent pairs that are always read."""
        return Budget(self.budget, self.n_sink, self.n_recent)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        return Recipe(selector=self.selector_at)

    @abstractmethod
    def selector_at(self, layer: int) -> Selector | None:
        """Return the selector of an attention layer; None reads everything."""
        raise NotImplementedError(f"{type(self).__name__} must override `selector_at`")
