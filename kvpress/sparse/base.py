# SPDX-License-Identifier: Apache-2.0
"""What presses that select share: a budget of pairs to read."""

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
    """Keeps every pair, and reads about `budget` sealed pairs of each head for every new token.

    `budget` is a number of pairs, or a fraction in (0, 1) of those held. The oldest `n_sink` and the newest `n_recent` sealed
    pairs are always chosen; pairs that are not sealed yet are read besides.
    """

    budget: float = 1024
    n_sink: Size = field(default=0, kw_only=True)
    n_recent: Size = field(default=0, kw_only=True)

    def validate(self) -> None:
        super().validate()
        if isinstance(self.budget, float):
            if not 0 < self.budget < 1:
                raise ValueError(f"budget must be a whole number of pairs, or a fraction in (0, 1), got {self.budget}")
        else:
            check_count("budget", self.budget, least=max(1, self.n_sink + self.n_recent))

    @property
    def limits(self) -> Budget:
        """The budget with what is always chosen."""
        return Budget(self.budget, self.n_sink, self.n_recent)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        return Recipe(selector=self.selector_at)

    @abstractmethod
    def selector_at(self, layer: int) -> Selector | None:
        """Return how an attention layer chooses; None reads everything."""
