# SPDX-License-Identifier: Apache-2.0
"""Text on terminals and in pipes."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def print_text(console: Console, text: str, style: str = "") -> None:
    """Print text without markup: a terminal wraps it at words, a pipe gets each of its lines in one piece."""
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)
