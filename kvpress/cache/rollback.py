# SPDX-License-Identifier: Apache-2.0
"""Taking back the newest tokens of a layer: what is kept for that, and how the layer gets back to what it was."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from kvpress.cache.savepoint import Savepoint
from kvpress.cache.segment import Segment
from kvpress.cache.window import Window


class Rollback:
    """The part of a store that takes tokens back; see `KVStore` for the other attributes.

    The newest tokens are *open* as long as nothing but their pairs came to the store: then `crop` takes them back by dropping
    these. `fixed_at` is how many tokens had been seen when something else last happened. While the store records, it keeps
    what it was right before (`journal`, else None), so that all tokens since then stay open.
    """

    batch: int
    heads: int
    window: Window
    seen: int
    since_eviction: int
    counted: int
    settled: list[int]
    sealed_tokens: list[int] | None
    observers: dict[Any, Any]
    fixed_at: int
    journal: list[Savepoint] | None
    dense: Any
    """The dense sealed segment, None where there is none."""
    _dense: Any
    """The same, as it is held: rows may have it in common."""

    def record(self, recording: bool) -> None:
        """Keep what changes from now on, so that every token that follows can be taken back, or stop doing so."""
        if recording != (self.journal is not None):
            self.journal = [] if recording else None

    def save(self, unit: int | None = None) -> None:
        """Note that something but new pairs is about to come to the store; keep what it is now, while it records.

        Of the tokens that came after the first `unit`, all are taken back or none.
        """
        if self.journal is not None and not (self.journal and self.journal[-1].seen == self.seen):
            self.journal.append(Savepoint(self, unit))
        self.fixed_at = self.seen

    def fix(self) -> None:
        """Make all tokens ones that cannot be taken back, and let go of what was kept for that."""
        self.fixed_at = self.seen
        if self.journal is not None:
            self.journal = []

    @property
    def open_tokens(self) -> int:
        """How many of the newest tokens can be taken back."""
        if self.journal:
            return self.seen - self.journal[0].oldest
        fresh = self.seen - self.fixed_at
        return fresh if fresh <= self.window.length else min(fresh, self.rereadable_tokens)

    def check_crop(self, tokens: int) -> None:
        """Refuse to take back tokens that are not open.

        Raises:
            ValueError: there are not so many, or something happened to the cache since that cannot be undone.
        """
        if tokens > self.seen:
            raise ValueError(f"cannot take back {tokens} tokens: the cache has seen {self.seen}")
        if tokens > self.open_tokens:
            raise ValueError(
                f"cannot take back {tokens} tokens, only the newest {self.open_tokens}: before them, pairs were evicted, "
                "encoded or observed; call cache.activate_past_recording() after the prompt, before what may be taken back is "
                "read, or copy the cache (copy.deepcopy) before"
            )
        point, target = self._point(tokens), self.seen - tokens
        if point is not None and point.unit is not None and point.unit < target:
            raise ValueError(
                f"cannot take back {tokens} tokens: those from {point.unit} to {point.seen} were observed as one turn; take "
                f"back {self.seen - point.seen} or {self.seen - point.unit}"
            )

    def _point(self, tokens: int) -> Savepoint | None:
        """Return what was kept before the first thing that happened after the tokens that stay."""
        return next((point for point in self.journal or () if point.seen > self.seen - tokens), None)

    def crop(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens, which must be open: the store is then as if they had never come.

        The tokens that stay count as accepted, so that what was kept to take them back is let go.
        """
        self.check_crop(tokens)
        target, point, latest = self.seen - tokens, self._point(tokens), dict(self.observers)
        if point is not None:
            point.restore(self)
        for wanted, observer in [item for item in self.observers.items() if item[1].by_token]:
            found = observer if observer.end >= target else latest.get(wanted, observer)
            found.crop(max(0, found.end - target))
            self.observers[wanted] = found
        self._drop(self.seen - target)
        self.since_eviction = max(0, self.since_eviction - max(0, self.counted - target))
        self.seen, self.counted = target, min(self.counted, target)
        self.settled = [seen for seen in self.settled if seen <= target]
        if self.journal is not None:
            self.journal = []

    @property
    def rereadable_tokens(self) -> int:
        """How many of the newest tokens can be read once more: those that every stream holds, without gaps, densely.

        What was evicted since they came does not matter, as it does where an earlier state is to be restored.
        """
        return self.window.length + (0 if self._dense is None else self._dense_tail(self._dense))

    def _dense_tail(self, dense: Segment) -> int:
        """How many tokens right before the window every stream of the dense segment holds."""
        layout, tail = dense.layout, self.window.first
        for n, newest in enumerate(dense.slots().split(layout.lengths)):
            before = torch.arange(self.window.first - layout.lengths[n], self.window.first, device=newest.device)
            tail = min(tail, int((newest == before).flip(0).long().cumprod(0).sum()))
        return tail

    def newest_side(self, tokens: int) -> dict[str, Tensor]:
        """Return the side arrays `[B, H, tokens]` of the newest tokens, at most `rereadable_tokens`."""
        sealed = max(0, tokens - self.window.length)
        found = {name: array[..., self.window.length - (tokens - sealed) :] for name, array in self.window.side.items()}
        if not sealed or self.dense is None:
            return found
        ends = self.dense.layout.starts_tensor + self.dense.layout.lengths_tensor
        rows = (ends[:, None] + torch.arange(-sealed, 0)).flatten().to(self.dense.device)
        shape = (self.batch, self.heads, -1)
        for name in {*found, *self.dense.side}:
            older = self.dense.side_array(name)[rows].view(shape)
            fresh = found.get(name, older.new_zeros(*shape[:2], tokens - sealed))
            found[name] = torch.cat([older, fresh], dim=-1)
        return found

    def take_back(self, tokens: int) -> None:
        """Drop the pairs of the newest `tokens` tokens, at most `rereadable_tokens`; what observers saw stays."""
        if self.journal:
            self.window = copy.deepcopy(self.window)  # what is read again must not be written over what was kept
        self._drop(tokens)
        self.seen -= tokens
        self.since_eviction = max(0, self.since_eviction - tokens)

    def _drop(self, tokens: int) -> None:
        """Drop the pairs of the newest `tokens` tokens, those of the window and then dense ones."""
        sealed = max(0, tokens - self.window.length)
        self.window.crop(tokens - sealed)
        if sealed and self.dense is not None:
            held, _ = self.dense.cut([length - sealed for length in self.dense.layout.lengths])
            self.dense = held if held.layout.total else None
            self.window = self.window.emptied(self.seen - tokens)
            self.sealed_tokens = [count - sealed for count in self.sealed_tokens or []]
