# SPDX-License-Identifier: Apache-2.0
"""Prediction of the bytes of a stream, by the rules of `KVStore` and `Window`, from numbers alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvpress.cache.codec import Codec
from kvpress.cache.segment import SLOT
from kvpress.cache.window import GROWTH

CPU = torch.device("cpu")
"""Device whose sealing is planned; a GPU seals generated tokens later, in larger blocks."""


@dataclass
class Sealed:
    """Pairs in one segment."""

    pairs: float
    """Number of pairs."""
    tiles: float
    """Bytes of their tiles."""
    form: str
    """Storage format: `dense`, `encoded` or `generated`."""
    placed: bool
    """Whether slots are stored, because the stream has gaps."""


@dataclass
class PlannedStream:
    """Pairs of one row and KV head."""

    dim: int
    """Numbers in a key."""
    pair_dim: int
    """Numbers in a pair."""
    dtype: torch.dtype
    """Type of the model."""
    codec: Codec | None = None
    """Codec of the layer."""
    ragged: bool = False
    """Whether streams differ in length; this one then has the mean length."""
    index_bytes: Callable[[float], float] = lambda pairs: 0.0
    """Maps a number of pairs to the bytes of a selector's index."""
    side_bytes: tuple[int, int] = (0, 0)
    """Bytes of the per-pair arrays of a pair before and after encoding."""
    segments: list[Sealed] = field(default_factory=list)
    """Encoded segments and sinks, oldest first."""
    dense: float = 0.0
    """Pairs in the dense sealed segment."""
    placed: float = 0.0
    """Oldest of these pairs, which have gaps."""
    window: int = 0
    """Pairs in the window."""
    capacity: int = 0
    """Pairs that the window has memory for."""
    generated: int = 0
    """Tokens generated after the prompt."""

    @property
    def pair_bytes(self) -> int:
        """Bytes of a dense pair."""
        return self.pair_dim * self.dtype.itemsize

    @property
    def pairs(self) -> float:
        """Number of stored pairs."""
        return sum(part.pairs for part in self.segments) + self.dense + self.window

    @property
    def tail_bytes(self) -> float:
        """Extra bytes of pairs that are dense only because they do not fill a tile."""
        if self.codec is None:
            return 0.0
        pairs = max(0.0, self.dense + self.window - self.codec.residual - self._sinks())
        return pairs * max(0.0, self.pair_bytes - self.codec.pair_bytes(self.dim, self.dtype))

    @property
    def bytes(self) -> float:
        """Held bytes."""
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
        """Read a prompt of `tokens` tokens, of which `kept` pairs stay."""
        if kept < tokens:
            self.dense = self.placed = kept
        else:
            self.window = self.capacity = tokens
        self._settle(generated=False)

    def generate(self, tokens: int) -> None:
        """Generate tokens one by one."""
        while tokens > 0:
            step = min(tokens, self._until_settled())
            self._append(step)
            tokens -= step
            self.generated += step
            self._settle(generated=True)

    def evict(self, kept: float) -> None:
        """Keep so many pairs, in proportion from all segments, and seal the dense ones."""
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
        """Return the number of tokens until the next tile may be full."""
        codec = self.codec
        if codec is None:
            return 2**62
        lacking = codec.residual + self._sinks() + codec.tile_size(not self.segments) - self.dense - self.window
        interval = codec.interval(CPU)
        tokens = interval - self.generated % interval
        return tokens + max(0, math.ceil((lacking - tokens) / interval)) * interval

    def _settle(self, generated: bool) -> None:
        codec = self.codec
        if codec is None or (generated and self.generated % codec.interval(CPU)):
            return
        sinks = self._sinks()
        free = self.dense + self.window - codec.residual - sinks
        # On average, streams of different lengths leave half a tile.
        step = codec.tile_size(not self.segments)
        tiles = max(0.0, free - (step - 1) / 2) if self.ragged else max(0, free // step * step)
        if not tiles:
            return
        if sinks:
            self.segments.append(Sealed(sinks, sinks * self.pair_bytes, "dense", self.placed > 0))
        size = [codec.tile_bytes(round(tiles), self.dim, self.dtype, is_generated) for is_generated in (False, True)]
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
