# SPDX-License-Identifier: Apache-2.0
"""Parse numbers of tokens, sizes in bytes and times, and format sizes and lists of values for messages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

_UNITS = {"": 1, "k": 1024, "m": 1024**2}
_SHOWN = 4


def parse_count(value: Any, name: str = "tokens", least: int = 1) -> int:
    """Read a number of tokens such as 4096, 8k (8192), 128k or 1M (1048576); units are those of context lengths, 1024.

    Raises:
        ValueError: not such a number, or less than `least`; `name` is its name in the message.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmM]?)\s*", str(value))
    number = float(match[1]) * _UNITS[match[2].lower()] if match else -1.0
    if not number.is_integer() or number < 0:
        raise ValueError(f"{name} must be an integer such as 4096, 8k, 128k or 1M, got {value!r}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(number)


def few(values: Iterable[Any]) -> str:
    """Return a list for a message: all values of a short list, else the first four and the count."""
    texts = list(map(str, values))
    if len(texts) <= 2 * _SHOWN:
        return ", ".join(texts)
    return f"{', '.join(texts[:_SHOWN])}, ... ({len(texts)} in all)"


def parse_bytes(text: str, name: str = "limit") -> int:
    """Parse a size in bytes, such as 4GB, 512MiB or 1000000; `name` is its name in messages.

    Raises:
        ValueError: `text` is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]?)B|([KMGT])iB)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ValueError(f"{name} must be a size such as 4GB, 512MiB or 300000, got {text!r}")
    unit = (match[2] or match[3] or "").upper()
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(unit or " "))


def parse_seconds(value: Any, name: str = "seconds") -> float:
    """Read a limit in seconds, such as 120 or 0.5; `name` is its name in messages.

    Raises:
        ValueError: not a number, not above 0, or infinite.
    """
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(
            f"{name} must be a number of seconds above 0, such as 120, got {value!r}; without a limit, leave it out"
        )
    return seconds


def format_bytes(size: float) -> str:
    """Format a size with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
