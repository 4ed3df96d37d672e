# SPDX-License-Identifier: Apache-2.0
"""Line breaks on a terminal: in text between words, in long names between their parts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.measure import Measurement
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_AFTER = (re.compile(r"(?<=[ ,;:(/])"), re.compile(r"(?<=[_=-])"))
"""Patterns of positions where a name may be broken: between parts, and between the words of a part."""


@dataclass(frozen=True)
class Name:
    """Renderable of rich for a name, such as of a press or a task, in a table cell."""

    text: str

    def lines(self, width: int) -> list[str]:
        """Return the name as lines of at most `width` characters. Only a longer word is broken."""
        lines = [""]
        for piece in self._pieces(width):
            if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
                lines.append("")
            lines[-1] += piece
        return [line.strip() for line in lines]

    def _pieces(self, width: int) -> Iterator[str]:
        """Yield unbreakable pieces: the parts of the name, and the words of parts longer than `width`."""
        for segment in _AFTER[0].split(self.text):
            if len(segment.rstrip()) <= width:
                yield segment
                continue
            for word in _AFTER[1].split(segment):
                yield from (word[start : start + width] for start in range(0, len(word.rstrip()), width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n".join(self.lines(max(1, options.max_width))), no_wrap=True, overflow="ignore")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        words = (word for segment in _AFTER[0].split(self.text) for word in _AFTER[1].split(segment))
        min_width = max((len(word.strip()) for word in words), default=0)
        return Measurement(min_width, max(min_width, len(self.text))).with_maximum(options.max_width)


def print_text(console: Console, text: str, style: str = "") -> None:
    """Print text without markup: a terminal wraps it at words, a pipe gets each of its lines in one piece."""
    console.print(Text(text, style=style), soft_wrap=not console.is_terminal)
