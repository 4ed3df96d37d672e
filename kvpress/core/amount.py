# SPDX-License-Identifier: Apache-2.0
"""How many pairs stay, and when others are evicted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpress.observe.call import Phase
from kvpress.observe.view import View

HIDDEN_STATES = 256
"""Newest hidden states that are kept while tokens are generated, for presses that read them."""


@dataclass(frozen=True)
class Amount:
    """Number of pairs that a head keeps on average: all but the share `ratio`, or `budget` of them.

    A ratio below 1 keeps at least one pair, a ratio of 1 keeps none. `protected` pairs are kept by any ratio below 1, so that
    as many tokens or fewer stay whole. `ratios` gives every layer that grows a ratio of its own.
    """

    ratio: float = 0.0
    budget: int | None = None
    protected: int = 0
    ratios: tuple[float, ...] = ()

    def at(self, depth: int) -> Amount:
        """Return the amount of one of the layers that grow."""
        return replace(self, ratio=self.ratios[depth], budget=None, ratios=()) if self.ratios else self

    def beside(self, view: View) -> Amount:
        """Return the amount for a view, where it depends on how the pairs of an earlier turn are stored."""
        del view
        return self

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is to be removed."""
        return self.budget is None and not any(self.ratios or (self.ratio,))

    def of(self, tokens: int) -> int:
        """Return how many of `tokens` pairs stay; the mean of all layers where they differ."""
        if self.ratios:
            return round(sum(self.at(depth).of(tokens) for depth in range(len(self.ratios))) / len(self.ratios))
        if self.budget is not None:
            return min(tokens, self.budget)
        if self.ratio >= 1:
            return 0
        return tokens if tokens <= self.protected else min(tokens, max(1, int(tokens * (1 - self.ratio))))

    def check(self, tokens: int) -> None:
        """Refuse a prompt of `tokens` for which a size is too small; every ratio and number of pairs suits all."""


@dataclass(frozen=True)
class Schedule:
    """When pairs are evicted: after a `prompt`, and after `every` so many generated tokens, None for never.

    With a `chunk`, prompts are read in chunks of at most so many tokens, and evicted from after each of them. `closing` follows
    every pass that closes a span instead, of a prompt or generated: see `Eviction.among`.
    While tokens are generated, `target` says how many pairs stay; None keeps as many as stayed of the prompt. `hidden_states`
    bounds those that are held for presses that read them.
    """

    prompt: bool = True
    every: int | None = None
    target: Amount | None = None
    hidden_states: int = HIDDEN_STATES
    chunk: int | None = None
    closing: bool = False

    def acts_in(self, phase: Phase) -> bool:
        """Whether anything is evicted in a phase."""
        return self.prompt if phase == "prefill" else self.every is not None or self.closing
