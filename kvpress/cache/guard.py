# SPDX-License-Identifier: Apache-2.0
"""Locks of caches: a thread that reads a cache waits for the end of a forward pass in another thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 60.0
"""Longest wait for a pass, in seconds; without a limit, a pass that waits for the reading thread would deadlock."""

_locks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def lock_of(cache: Any) -> Any:
    """Return the lock (`threading.RLock`) that a pass holds while it reads and writes a cache."""
    lock = _locks.get(cache)
    if lock is None:
        with _making:
            lock = _locks.setdefault(cache, threading.RLock())
    return lock


@contextmanager
def between_passes(cache: Any) -> Iterator[None]:
    """Lock a cache inside the block, after the pass of another thread; the thread of a pass may enter at any time.

    Raises:
        RuntimeError: the pass did not end for `PATIENCE` seconds.
    """
    lock = lock_of(cache)
    if not lock.acquire(timeout=PATIENCE):
        raise RuntimeError(
            f"this cache has been in a forward pass of another thread for {PATIENCE:.0f} seconds: read it after that "
            "pass, or read a copy (copy.deepcopy(cache)) that was made before"
        )
    try:
        yield
    finally:
        lock.release()
