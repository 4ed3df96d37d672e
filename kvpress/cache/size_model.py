# SPDX-License-Identifier: Apache-2.0
"""What a stream of a store will hold, found by the rules of the store (`KVStore`, `Window`) from numbers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvpress.cache.codec import Codec
from kvpress.cache.segment import SLOT
from kvpress.cache.window import GROWTH


@dataclass
class Sealed:
    """Pairs in one segment: bytes of their tiles, how they are held, and whether they need positions."""

    pairs: float
    tiles: float
    form: str
    placed: bool


@dataclass
class PlannedStream:
    """Pairs of one row and kv head, of the mean length where streams differ (`ragged`): `dim` numbers a key, `pair_dim` a pair.

    `dense` pairs are in the dense sealed segment, the oldest `placed` of them not contiguous; `window` are filled and
    `capacity` allocated. `index_bytes` is that of a selector, `side_bytes` what observers record of a pair before it is
    encoded and after.
    """

    dim: int
    pair_dim: int
    dtype: torch.dtype
    codec: Codec | None = None
    ragged: bool = False
    index_bytes: Callable[[float], float] = lambda pairs: 0.0
    side_bytes: tuple[int, int] = (0, 0)
    segments: list[Sealed] = field(default_factory=list)
    dense: float = 0.0
    placed: float = 0.0
    window: int = 0
    capacity: int = 0

    @property
    def pair_bytes(self) -> int:
        """Bytes of a dense pair."""
        return self.pair_dim * self.dtype.itemsize

    @property
    def pairs(self) -> float:
        """Pairs held."""
        return sum(part.pairs for part in self.segments) + self.dense + self.window

    @property
    def tail_bytes(self) -> float:
        """What pairs that are dense only because they fill no tile take more than they would encoded."""
        if self.codec is None:
            return 0.0
        pairs = max(0.0, self.dense + self.window - self.codec.residual - self._sinks())
        return pairs * max(0.0, self.pair_bytes - self.codec.pair_bytes(self.dim, self.dtype))

    @property
    def bytes(self) -> float:
        """Bytes held."""
        open_bytes, sealed_bytes = self.side_bytes
        total: float = self.capacity * self.pair_bytes + self.window * open_bytes
        total += self.dense * (self.pair_bytes + open_bytes + (SLOT if self.placed else 0))
        for part in self.segments:
            total += part.tiles + self.index_bytes(part.pairs)
            encoded = self.codec if part.form != "dense" else None
            slot = SLOT if encoded is None else encoded.slot_bytes
            total += part.pairs * (sealed_bytes + (slot if part.placed else 0))
            total += 0 if encoded is None else encoded.fixed_bytes(self.dim)
        return total

    def read(self, tokens: int, kept: int) -> None:
        """Take in a prompt, of which `kept` pairs stay."""
        if kept < tokens:
            self.dense = self.placed = kept
        else:
            self.window = self.capacity = tokens
        self._settle(generated=False)

    def generate(self, tokens: int) -> None:
        """Take in tokens one by one."""
        while tokens > 0:
            step = min(tokens, self._until_settled())
            self._append(step)
            tokens -= step
            self._settle(generated=True)

    def evict(self, kept: float) -> None:
        """Keep so many pairs, evenly of all that is held, and leave what is not encoded in the dense segment."""
        share = kept / self.pairs if self.pairs else 1.0
        if share >= 1:
            return
        for part in self.segments:
            part.pairs, part.tiles, part.placed = part.pairs * share, part.tiles * share, True
        self.dense = self.placed = (self.dense + self.window) * share
        self.window = self.capacity = 0

    def _append(self, tokens: int) -> None:
        self.window += tokens
        while self.capacity < self.window:
            self.capacity += max(GROWTH, self.capacity // 64) if self.capacity else 1

    def _sinks(self) -> float:
        return 0 if self.codec is None or self.segments else min(self.codec.sinks, self.dense + self.window)

    def _until_settled(self) -> int:
        """Return after how many tokens the next tile may be full."""
        codec = self.codec
        if codec is None:
            return 2**62
        lacking = codec.residual + self._sinks() + codec.tile_size(not self.segments) - self.dense - self.window
        return max(1, codec.group - self.window, int(lacking))

    def _settle(self, generated: bool) -> None:
        codec = self.codec
        if codec is None or (generated and self.window < codec.group):
            return
        sinks = self._sinks()
        free = self.dense + self.window - codec.residual - sinks
        # Streams of all lengths leave, on average, half a tile over.
        step = codec.tile_size(not self.segments)
        tiles = max(0.0, free - (step - 1) / 2) if self.ragged else max(0, free // step * step)
        if not tiles:
            return
        if sinks:
            self.segments.append(Sealed(sinks, sinks * self.pair_bytes, "dense", self.placed > 0))
        size = [codec.tile_bytes(round(tiles), self.dim, self.dtype, made) for made in (False, True)]
        form = "encoded" if size[0] == size[1] or not generated else "generated"
        self.segments.append(Sealed(tiles, size[generated], form, self.placed > sinks))
        self.dense = self.dense + self.window - sinks - tiles
        self.placed = max(0, self.placed - sinks - tiles)
        self.window = self.capacity = 0
        self._join_tail()

    def _join_tail(self) -> None:
        while len(self.segments) > 1:
            older, newer = self.segments[-2:]
            if older.form != newer.form or older.pairs > 2 * newer.pairs:
                return
            placed = older.placed or newer.placed
            self.segments[-2:] = [Sealed(older.pairs + newer.pairs, older.tiles + newer.tiles, newer.form, placed)]
