# SPDX-License-Identifier: Apache-2.0
"""Settings of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSettings:
    """Limits of the engine."""

    presses: Sequence[str]
    """Presses that requests may choose; the first is the default."""
    memory: int
    """Bytes for caches."""
    chunk: int = 256
    """Tokens of a prompt that are read between two decode steps."""
    queue: int = 256
    """Most waiting requests."""
    rows: int = 64
    """Most requests that run at once."""
    prompts: int = 4
    """Most prompts that are read at once, in turn."""
    preempt_seconds: float | None = None
    """Seconds of waiting after which a short request suspends a long one; None for never."""
