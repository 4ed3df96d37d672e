# SPDX-License-Identifier: Apache-2.0
"""Numbers of tokens as users write them, and lists of numbers as messages show them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

_UNITS = {"": 1, "k": 1024, "m": 1024**2}
_SHOWN = 4


def parse_count(value: Any, name: str = "tokens", least: int = 1) -> int:
    """Read a number of tokens such as 4096, 8k (8192), 128k or 1M (1048576); units are those of context lengths, 1024.

    Raises:
        ValueError: it is no such number, or smaller than `least`; the message calls it `name`.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmM]?)\s*", str(value))
    number = float(match[1]) * _UNITS[match[2].lower()] if match else -1.0
    if not number.is_integer() or number < 0:
        raise ValueError(f"{name} must be a whole number such as 4096, 8k, 128k or 1M, got {value!r}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return int(number)


def few(values: Iterable[Any]) -> str:
    """Return a list for a message: all of a short one, else the first values and their number."""
    texts = list(map(str, values))
    if len(texts) <= 2 * _SHOWN:
        return ", ".join(texts)
    return f"{', '.join(texts[:_SHOWN])}, ... ({len(texts)} in all)"
