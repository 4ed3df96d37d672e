# SPDX-License-Identifier: Apache-2.0
"""Removal of the newest tokens of a layer: savepoints, and restoring them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from kvpress.cache.savepoint import Savepoint
from kvpress.cache.segment import Segment
from kvpress.cache.window import Window


class Rollback:
    """Mixin of a store that removes its newest tokens; see `KVStore` for the other attributes.

    Tokens are *open* as long as `crop` can remove them. Without recording, these are the tokens after the last event that
    dropping pairs cannot undo, such as an eviction. While the store records, it makes a savepoint before each such event, so
    that all tokens since the first savepoint stay open.
    """

    batch: int
    heads: int
    window: Window
    seen: int
    since_eviction: list[int]
    counted: int
    settled: list[int]
    sealed_tokens: list[int] | None
    observers: dict[Any, Any]
    fixed_at: int
    """Tokens seen at the last event that dropping pairs cannot undo."""
    journal: list[Savepoint] | None
    """Savepoints, oldest first; None while the store does not record."""
    dense: Any
    """Dense sealed segment; None without one."""
    _dense: Any
    """Dense sealed segment, in which rows may share pairs."""

    def record(self, recording: bool) -> None:
        """Start or stop recording: while recording, every later token can be removed again."""
        if recording != (self.journal is not None):
            self.journal = [] if recording else None

    def save(self, unit: int | None = None) -> None:
        """Call before an event that dropping pairs cannot undo; make a savepoint if the store records.

        The tokens after the first `unit` can then only be removed together.
        """
        if self.journal is not None and not (self.journal and self.journal[-1].seen == self.seen):
            self.journal.append(Savepoint(self, unit))
        self.fixed_at = self.seen

    def fix(self) -> None:
        """Close all tokens, so that none can be removed, and drop savepoints."""
        self.fixed_at = self.seen
        if self.journal is not None:
            self.journal = []

    @property
    def open_tokens(self) -> int:
        """Number of newest tokens that can be removed."""
        if self.journal:
            return self.seen - self.journal[0].oldest
        num_open = self.seen - self.fixed_at
        return num_open if num_open <= self.window.length else min(num_open, self.rereadable_tokens)

    def check_crop(self, tokens: int) -> None:
        """Check that the newest `tokens` tokens are open.

        Raises:
            ValueError: the cache has fewer tokens, or an event since then cannot be undone.
        """
        if tokens > self.seen:
            raise ValueError(f"cannot take back {tokens} tokens: the cache has seen {self.seen}")
        if tokens > self.open_tokens:
            raise ValueError(
                f"cannot take back {tokens} tokens, only the newest {self.open_tokens}: before them, pairs were evicted, "
                "encoded or observed; call cache.activate_past_recording() after the prompt, before tokens that you may take "
                "back, or copy the cache (copy.deepcopy) before"
            )
        point, target = self._point(tokens), self.seen - tokens
        if point is not None and point.unit is not None and point.unit < target:
            raise ValueError(
                f"cannot take back {tokens} tokens: those from {point.unit} to {point.seen} were observed as one turn; take "
                f"back {self.seen - point.seen} or {self.seen - point.unit}"
            )

    def _point(self, tokens: int) -> Savepoint | None:
        """Return the savepoint of the first event after the tokens that stay."""
        return next((point for point in self.journal or () if point.seen > self.seen - tokens), None)

    def crop(self, tokens: int) -> None:
        """Remove the newest `tokens` tokens, which must be open: the store is then as if they had never been read.

        The remaining tokens count as accepted: their savepoints are dropped.
        """
        self.check_crop(tokens)
        target, point, latest = self.seen - tokens, self._point(tokens), dict(self.observers)
        if point is not None:
            point.restore(self)
        for request, observer in [item for item in self.observers.items() if item[1].by_token]:
            kept_observer = observer if observer.end >= target else latest.get(request, observer)
            kept_observer.crop(max(0, kept_observer.end - target))
            self.observers[request] = kept_observer
        self._drop(self.seen - target)
        self._uncount(self.counted - target)
        self.seen, self.counted = target, min(self.counted, target)
        self.settled = [seen for seen in self.settled if seen <= target]
        if self.journal is not None:
            self.journal = []

    @property
    def rereadable_tokens(self) -> int:
        """Number of newest tokens that can be read again: every stream stores all of them densely.

        Unlike for `crop`, evictions of earlier pairs do not matter.
        """
        return self.window.length + (0 if self._dense is None else self._dense_tail(self._dense))

    def _dense_tail(self, dense: Segment) -> int:
        """Return the number of tokens right before the window that every stream of the dense segment stores."""
        layout, tail = dense.layout, self.window.first
        for n, newest in enumerate(dense.slots().split(layout.lengths)):
            before = torch.arange(self.window.first - layout.lengths[n], self.window.first, device=newest.device)
            tail = min(tail, int((newest == before).flip(0).long().cumprod(0).sum()))
        return tail

    def newest_side(self, tokens: int) -> dict[str, Tensor]:
        """Return the per-pair arrays `[B, H, tokens]` of the newest tokens, at most `rereadable_tokens`."""
        sealed = max(0, tokens - self.window.length)
        arrays = {
            name: array[..., self.window.length - (tokens - sealed) :] for name, array in self.window.side.items()
        }
        if not sealed or self.dense is None:
            return arrays
        ends = self.dense.layout.starts_tensor + self.dense.layout.lengths_tensor
        rows = (ends[:, None] + torch.arange(-sealed, 0)).flatten().to(self.dense.device)
        shape = (self.batch, self.heads, -1)
        for name in {*arrays, *self.dense.side}:
            older = self.dense.side_array(name)[rows].view(shape)
            newer = arrays.get(name, older.new_zeros(*shape[:2], tokens - sealed))
            arrays[name] = torch.cat([older, newer], dim=-1)
        return arrays

    def take_back(self, tokens: int) -> None:
        """Drop the pairs of the newest `tokens` tokens, at most `rereadable_tokens`; observers do not change."""
        if self.journal:
            self.window = copy.deepcopy(self.window)  # tokens that are read again must not overwrite the savepoint
        self._drop(tokens)
        self.seen -= tokens
        self._uncount(tokens)

    def _uncount(self, tokens: int) -> None:
        """Take so many generated tokens off the count of every row."""
        self.since_eviction = [max(0, count - max(0, tokens)) for count in self.since_eviction]

    def _drop(self, tokens: int) -> None:
        """Drop the pairs of the newest `tokens` tokens, from the window first and then from the dense segment."""
        sealed = max(0, tokens - self.window.length)
        self.window.crop(tokens - sealed)
        if sealed and self.dense is not None:
            kept, _ = self.dense.cut([length - sealed for length in self.dense.layout.lengths])
            self.dense = kept if kept.layout.total else None
            self.window = self.window.emptied(self.seen - tokens)
            self.sealed_tokens = [count - sealed for count in self.sealed_tokens or []]
