# SPDX-License-Identifier: Apache-2.0
"""Count calls of compiled kernels, so that a test can prove that a kernel ran and not the fallback."""

from __future__ import annotations

from collections import Counter

_calls: Counter[str] = Counter()


def counters() -> dict[str, int]:
    """Return the calls of compiled kernels since the last reset, by operator name."""
    return dict(_calls)


def reset_counters() -> None:
    """Reset all counts to zero."""
    _calls.clear()


def count(name: str) -> None:
    """Count one call of an operator's compiled kernel."""
    _calls[name] += 1
