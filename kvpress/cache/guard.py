# SPDX-License-Identifier: Apache-2.0
"""Caches that one thread looks at while another one writes to them: who looks waits for the end of the forward pass."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 60.0
"""Seconds that a pass is waited for: a thread that is itself waited for by the pass would wait for ever."""

_locks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def lock_of(cache: Any) -> Any:
    """Return the lock (`threading.RLock`) that a pass holds while it reads and writes a cache."""
    found = _locks.get(cache)
    if found is None:
        with _making:
            found = _locks.setdefault(cache, threading.RLock())
    return found


@contextmanager
def between_passes(cache: Any) -> Iterator[None]:
    """Keep a cache as it is inside the block, once the pass of another thread is over; within a pass its thread may look on.

    Raises:
        RuntimeError: the pass did not end for `PATIENCE` seconds.
    """
    lock = lock_of(cache)
    if not lock.acquire(timeout=PATIENCE):
        raise RuntimeError(
            f"this cache has been in a forward pass of another thread for {PATIENCE:.0f} seconds: look at it once that pass "
            "has ended, or at a copy (copy.deepcopy(cache)) that was made before"
        )
    try:
        yield
    finally:
        lock.release()
