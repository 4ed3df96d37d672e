# SPDX-License-Identifier: Apache-2.0
"""Format tables and numbers for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table
from rich.text import Text

from kvpress.terminal import Name

__all__ = ["MISSING", "Name", "number", "plain_table"]

MISSING = "-"


def number(value: float | None, digits: int) -> str:
    """Return a number with `digits` decimals, or a dash if it was not measured."""
    return MISSING if value is None else f"{value:.{digits}f}"


def plain_table(texts: Iterable[str], numbers: Iterable[str], gap: int = 2, **style: Any) -> Table:
    """Return a table without lines: columns of text, which fold if they are too long, then columns of numbers.

    A `Name` in a column of text folds between its parts.
    """
    table = Table(box=None, header_style="bold", padding=(0, gap, 0, 0), **style)
    for heading in texts:
        table.add_column(Text(heading), overflow="fold")
    for heading in numbers:
        table.add_column(Text(heading), justify="right", no_wrap=True)
    return table
