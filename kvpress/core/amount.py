# SPDX-License-Identifier: Apache-2.0
"""Amounts and schedules: how many pairs stay, and when the others are evicted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpress.observe.call import Phase
from kvpress.observe.view import View

HIDDEN_STATES = 256
"""Number of the newest hidden states that are stored while tokens are generated, for presses that read them."""


@dataclass(frozen=True)
class Amount:
    """Number of pairs that a head keeps, on average."""

    ratio: float = 0.0
    """Share of pairs removed. Below 1, at least one pair stays; at 1, none."""
    budget: int | None = None
    """Pairs kept, instead of a share; None for `ratio`."""
    protected: int = 0
    """Prompts of up to this many tokens lose nothing at a ratio below 1."""
    ratios: tuple[float, ...] = ()
    """Ratio of each layer whose cache grows; empty for the same one in all."""

    def at(self, depth: int) -> Amount:
        """Return the amount of layer number `depth` among those whose cache grows."""
        return replace(self, ratio=self.ratios[depth], budget=None, ratios=()) if self.ratios else self

    def beside(self, view: View) -> Amount:
        """Return the amount for a view; subclasses change it by the storage of pairs of earlier turns."""
        del view
        return self

    @property
    def keeps_all(self) -> bool:
        """Whether all pairs stay for any number of tokens."""
        return self.budget is None and not any(self.ratios or (self.ratio,))

    def of(self, tokens: int) -> int:
        """Return how many of `tokens` pairs stay; the mean over layers if layers have ratios of their own."""
        if self.ratios:
            return round(sum(self.at(depth).of(tokens) for depth in range(len(self.ratios))) / len(self.ratios))
        if self.budget is not None:
            return min(tokens, self.budget)
        if self.ratio >= 1:
            return 0
        return tokens if tokens <= self.protected else min(tokens, max(1, int(tokens * (1 - self.ratio))))

    def while_generating(self, view: View, left: int) -> int:
        """Return how many pairs stay while tokens are generated, after `left` stayed the last time."""
        del view
        return left

    def check(self, tokens: int) -> None:
        """Check that a prompt of `tokens` tokens suits the sizes; subclasses raise ValueError, ratios and budgets suit any."""


@dataclass(frozen=True)
class Schedule:
    """When pairs are evicted."""

    prompt: bool = True
    """Evicts after a prompt."""
    every: int | None = None
    """Evicts after this many generated tokens, again and again; None for never."""
    target: Amount | None = None
    """Number of pairs that stay while tokens are generated; None for the number that stayed after the prompt."""
    hidden_states: int = HIDDEN_STATES
    """Most hidden states stored for presses that read them, while tokens are generated."""
    chunk: int | None = None
    """Prompts are read in chunks of at most this many tokens, with an eviction after each; None reads them at once."""
    as_turns: bool = False
    """Each chunk is a turn of its own: pairs that stay are encoded before the next chunk is read."""
    closing: bool = False
    """Evicts after every pass that closes a span, of a prompt or of generated tokens (see `Eviction.among`)."""

    def acts_in(self, phase: Phase) -> bool:
        """Whether anything is evicted in a phase."""
        return self.prompt if phase == "prefill" else self.every is not None or self.closing
