# SPDX-License-Identifier: Apache-2.0
"""Requirements of a press that a search has to meet, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import kvpress
from kvpress.cache.report import format_bytes
from kvpress.core.registry import STATUSES
from kvpress_eval.common.errors import ConfigError
from kvpress_eval.results.guarantee import least_contexts
from kvpress_eval.results.verdict import Margin, points
from kvpress_eval.tuning.items import Split
from kvpress_eval.tuning.sizing import Limit, MemoryLimit
from kvpress_eval.tuning.space import NOTHING

GUARANTEED = 5.0
"""Points that a press with a guarantee may lose if `max_drop` is not set."""


@dataclass(frozen=True)
class Wishes:
    """Requirements of a press, and limits of the search for it. Either `memory` or `smaller` is required."""

    memory: str | None = None
    """Limit for weights and caches together, such as "4GB"."""
    smaller: float | None = None
    """Factor by which the cache must be smaller than uncompressed."""
    max_drop: float | None = None
    """Points that the worst task may lose: picks the smallest such press; None picks the press that loses least."""
    context: int | None = None
    """Tokens per sequence for `memory`; None: the longest length."""
    batch: int = 1
    """Sequences for `memory`."""
    held_out: int = 24
    """Contexts of each task that are measured at the end."""
    candidates: int = 96
    """Number of candidates of the search."""
    minutes: float | None = None
    """Time limit of the search."""
    data: Path | None = None
    """File with the user's own samples, used instead of tasks."""
    status: str | None = None
    """Statuses of the presses that are searched, separated by commas; None searches all presses."""
    confidence: float | None = None
    """Probability, such as 0.95, with which the pick must lose at most `max_drop` points (5 without it) on new contexts; None
    requires no guarantee."""

    @property
    def margin(self) -> Margin:
        """Loss that a guarantee allows."""
        return points(GUARANTEED if self.max_drop is None else self.max_drop)

    @property
    def statuses(self) -> tuple[str, ...]:
        """Statuses of the presses that are searched."""
        return tuple(STATUSES) if self.status is None else tuple(word.strip() for word in self.status.split(","))

    def check(self) -> None:
        """Check all values.

        Raises:
            ConfigError: a value is out of range, or two values contradict each other.
        """
        if (self.memory is None) == (self.smaller is None):
            raise ConfigError(
                "give either memory, such as 4GB, or smaller, such as 10: exactly one of them sets the size"
            )
        bounds: dict[str, tuple[float | None, float]] = {
            "smaller": (self.smaller, 1.0), "max_drop": (self.max_drop, 0.0), "context": (self.context, 16),
            "batch": (self.batch, 1), "held_out": (self.held_out, 2), "candidates": (self.candidates, 1),
            "minutes": (self.minutes, 0.0),
        }  # fmt: skip
        for name, (value, bound) in bounds.items():
            if value is not None and not value >= bound:
                raise ConfigError(f"{name} must be at least {bound:g}, got {value:g}")
        if self.smaller is not None and (self.context is not None or self.batch != 1):
            raise ConfigError("context and batch apply to memory only; smaller holds at every length and batch")
        if unknown := sorted(set(self.statuses) - STATUSES.keys()):
            raise ConfigError(f"status must be {', '.join(STATUSES)} or several of them, got {', '.join(unknown)!r}")
        if self.confidence is not None:
            if not 0.5 <= self.confidence < 1:
                raise ConfigError(f"confidence must be at least 0.5 and below 1, such as 0.95, got {self.confidence:g}")
            if not 0 < self.margin.size < 100:
                raise ConfigError(
                    f"a guarantee needs a max_drop above 0 and below 100 points, got {self.margin.size:g}: no number of "
                    "samples shows that nothing is lost"
                )
        if self.smaller == 1:
            raise ConfigError("smaller must be above 1: at 1 there is nothing to find")


def check_needed(wishes: Wishes, room: MemoryLimit, limit: Limit) -> None:
    """Refuse a search if the full cache meets the limit, unless `max_drop` requests the smallest press.

    Raises:
        ConfigError: the full cache meets the limit.
    """
    if wishes.max_drop is not None or not limit.fits(kvpress.get_press(NOTHING)):
        return
    rows = f"{room.batch} x {room.context}" if room.batch > 1 else f"{room.context}"
    raise ConfigError(
        f"no press is needed: with memory {wishes.memory} the cache of {rows} tokens, at most "
        f"{format_bytes(max(room.uncompressed, room.peak))}, fits beside the weights. Give less memory, a longer context, or "
        "max_drop for the smallest press that loses no more points than that"
    )


def check_can_guarantee(wishes: Wishes, split: Split, finalists: int) -> None:
    """Refuse a search whose held-out contexts are too few for a guarantee, even if no finalist loses anything.

    Raises:
        ConfigError: a task has too few held-out contexts.
    """
    if wishes.confidence is None:
        return
    contexts: dict[str, int] = {}
    for part in split.held_out:
        contexts[part.task] = contexts.get(part.task, 0) + len(set(part.documents))
    task, fewest = min(contexts.items(), key=lambda item: item[1])
    needed = least_contexts(wishes.margin, wishes.confidence, finalists)
    if fewest < needed:
        raise ConfigError(
            f"confidence {wishes.confidence:g} that at most {wishes.margin} are lost needs {needed} held-out contexts of each "
            f"task even if none of them loses; {task} has {fewest}: give held_out={needed} or more (and as many samples), or a "
            "larger max_drop"
        )
