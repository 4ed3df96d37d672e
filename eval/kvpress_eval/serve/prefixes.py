# SPDX-License-Identifier: Apache-2.0
"""Compressed caches of shared texts and conversations, in memory up to a limit and in files beyond it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache

import kvpress
from kvpress.hf.cache.prefix_store import PrefixStore
from kvpress_eval.serve.metrics import Metrics
from kvpress_eval.serve.requests import PrefixKey


@dataclass(frozen=True)
class Prefix:
    """Compressed cache of a shared text or a conversation."""

    cache: Cache
    """Cache, of which every request continues a branch."""
    held_bytes: int
    """Bytes of the cache."""
    uncompressed_bytes: int
    """Bytes of the full cache."""


class Prefixes:
    """Prefixes by key; the least recently used ones leave the memory first.

    A prefix that leaves the memory stays in the files of the store, if there is one. The file of a shared text is written when
    the text is read, that of a conversation when it leaves the memory, so that no answer waits for it. A prefix that a request
    uses stays in memory, since dropping it would free nothing, and counts until the request ends.

    Args:
        model: the model.
        limit: bytes in memory.
        store: folder of files; None to forget prefixes that leave the memory.
        metrics: counts files that cannot be written or read. Such a prefix counts as missing there, and is read again.
    """

    def __init__(self, model: Any, limit: int, store: PrefixStore | None, metrics: Metrics) -> None:
        self.model, self.limit, self.store, self.metrics = model, limit, store, metrics
        self.hits = self.misses = 0
        self._by_key: OrderedDict[PrefixKey, Prefix] = OrderedDict()
        self._users: dict[PrefixKey, set[str]] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes of all prefixes in memory."""
        return sum(prefix.held_bytes for prefix in list(self._by_key.values()))

    @property
    def uncompressed_bytes(self) -> int:
        """Bytes of the full caches of all prefixes in memory."""
        return sum(prefix.uncompressed_bytes for prefix in list(self._by_key.values()))

    def __contains__(self, key: PrefixKey) -> bool:
        return key in self._by_key

    def peek(self, key: PrefixKey) -> Prefix | None:
        """Return a prefix in memory, without counting a lookup."""
        return self._by_key.get(key)

    def bytes_of(self, key: PrefixKey) -> int | None:
        """Return the bytes of a prefix in memory; None if it is not there."""
        prefix = self._by_key.get(key)
        return None if prefix is None else prefix.held_bytes

    def get(self, key: PrefixKey) -> Prefix | None:
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

    def put(self, key: PrefixKey, cache: Cache) -> Prefix:
        """Store the cache of a prefix."""
        if not key.conversation:
            self._write(key, cache)
        return self._add(key, cache)

    def pin(self, key: PrefixKey, user: str) -> None:
        """Keep a prefix in memory, once it is there, until `unpin`; `user` is the identifier of a request."""
        self._users.setdefault(key, set()).add(user)

    def unpin(self, key: PrefixKey, user: str) -> None:
        """End the use of a prefix by a request, if it uses the prefix."""
        users = self._users.get(key, set())
        if user in users:
            users.remove(user)
            if not users:
                del self._users[key]
            self._keep_limit()

    def make_room(self, needed: int, spared: PrefixKey | None = None) -> None:
        """Free at least `needed` bytes, or all prefixes in memory that no request uses, except `spared`."""
        freed = 0
        for key in list(self._by_key):
            if freed >= needed:
                return
            if key in self._users or key == spared:
                continue
            prefix = self._by_key.pop(key)
            freed += prefix.held_bytes
            if key.conversation:
                self._write(key, prefix.cache)

    def write_conversations(self) -> None:
        """Write the conversations in memory to files, if there is a folder, so that a restarted server finds them."""
        for key, prefix in self._by_key.items():
            if key.conversation:
                self._write(key, prefix.cache)

    def _write(self, key: PrefixKey, cache: Cache) -> None:
        if self.store is None:
            return
        try:
            if not self.store.keep(self.model, key.press, torch.tensor([key.ids]), cache, variant=key.conversation):
                self.metrics.failures.labels("store").inc()  # the store has logged the reason
        except Exception as error:  # no answer depends on the file
            self.metrics.count_failure("store", (), error)

    def _load(self, key: PrefixKey) -> Prefix | None:
        assert self.store is not None  # noqa: S101 - the caller checked
        try:
            entry = self.store.find(
                self.model, key.press, torch.tensor([key.ids]), variant=key.conversation, exact=True
            )
        except Exception as error:
            self.metrics.count_failure("store", (), error)
            return None
        return None if entry is None else self._add(key, entry.cache)

    def _add(self, key: PrefixKey, cache: Cache) -> Prefix:
        sealed = kvpress.branch(cache)  # requests that branch later share these pairs
        report = kvpress.memory_report(sealed)
        prefix = self._by_key[key] = Prefix(sealed, report.total_bytes, report.uncompressed_bytes)
        self._keep_limit()
        return prefix

    def _keep_limit(self) -> None:
        self.make_room(self.held_bytes - self.limit)
