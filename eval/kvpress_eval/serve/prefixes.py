# SPDX-License-Identifier: Apache-2.0
"""Compressed caches of system prompts and documents, in memory up to a limit and in files beyond it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

import kvpress
from kvpress.hf.cache.prefix_store import PrefixStore

Key = tuple[str, tuple[int, ...]]
"""Press and tokens of a prefix."""


@dataclass(frozen=True)
class Prefix:
    """Compressed cache of a text."""

    cache: Cache
    """Cache, of which every request continues a branch."""
    held_bytes: int
    """Bytes of the cache."""
    uncompressed_bytes: int
    """Bytes of the full cache."""


class Prefixes:
    """Prefixes by press and tokens; the least recently used ones leave the memory first.

    A prefix that leaves the memory stays in the files of the store, if there is one. Files are written when a prefix is
    read, so that a restarted server finds it too.

    Args:
        model: the model.
        limit: bytes in memory.
        store: folder of files; None to forget prefixes that leave the memory.
    """

    def __init__(self, model: Any, limit: int, store: PrefixStore | None) -> None:
        self.model, self.limit, self.store = model, limit, store
        self.hits = self.misses = 0
        self._by_key: OrderedDict[Key, Prefix] = OrderedDict()

    @property
    def held_bytes(self) -> int:
        """Bytes of all prefixes in memory."""
        return sum(prefix.held_bytes for prefix in list(self._by_key.values()))

    @property
    def uncompressed_bytes(self) -> int:
        """Bytes of the full caches of all prefixes in memory."""
        return sum(prefix.uncompressed_bytes for prefix in list(self._by_key.values()))

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def peek(self, key: Key) -> Prefix | None:
        """Return a prefix in memory, without counting a lookup."""
        return self._by_key.get(key)

    def get(self, key: Key) -> Prefix | None:
        """Return a prefix from memory or from its file, and count a hit or a miss."""
        prefix = self._by_key.get(key)
        if prefix is None and self.store is not None:
            prefix = self._load(key)
        if prefix is None:
            self.misses += 1
            return None
        self.hits += 1
        self._by_key.move_to_end(key)
        return prefix

    def put(self, key: Key, cache: Cache) -> Prefix:
        """Store the cache of a prefix, in a file too if there is a folder."""
        if self.store is not None:
            self.store.keep(self.model, key[0], torch.tensor([key[1]]), cache)
        return self._add(key, cache)

    def make_room(self, needed: int) -> None:
        """Free at least `needed` bytes, or all prefixes in memory."""
        freed = 0
        while self._by_key and freed < needed:
            freed += self._by_key.popitem(last=False)[1].held_bytes

    def _load(self, key: Key) -> Prefix | None:
        assert self.store is not None  # noqa: S101 - the caller checked
        entry = self.store.find(self.model, key[0], torch.tensor([key[1]]))
        if entry is None or entry.length != len(key[1]):
            return None
        return self._add(key, entry.cache)

    def _add(self, key: Key, cache: Cache) -> Prefix:
        sealed = kvpress.branch(cache)  # requests that branch later share these pairs
        report = kvpress.memory_report(sealed)
        prefix = self._by_key[key] = Prefix(sealed, report.total_bytes, report.uncompressed_bytes)
        self.make_room(self.held_bytes - self.limit)
        return prefix
