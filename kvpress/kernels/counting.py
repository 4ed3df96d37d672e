# SPDX-License-Identifier: Apache-2.0
"""How often each operator ran its fast path: lets a test prove that a kernel, not the fallback, did the work."""

from __future__ import annotations

from collections import Counter

_calls: Counter[str] = Counter()


def counters() -> dict[str, int]:
    """Calls of the fast path since the last reset, by operator name."""
    return dict(_calls)


def reset_counters() -> None:
    """Forget all counts."""
    _calls.clear()


def count(name: str) -> None:
    """Record one call of an operator's fast path."""
    _calls[name] += 1
