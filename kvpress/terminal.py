# SPDX-License-Identifier: Apache-2.0
"""Names on a terminal: lines end between the parts of a name, not inside a word."""

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
"""Where the line of a name may end: between its parts, and where even a part has no room, between the words of one."""


@dataclass(frozen=True)
class Name:
    """A press, a task or another name in the cell of a table, as a renderable of rich."""

    text: str

    def lines(self, width: int) -> list[str]:
        """Return the name as lines of at most `width` characters; only a word that is longer than this is broken."""
        found = [""]
        for piece in self._pieces(width):
            if found[-1] and len((found[-1] + piece).rstrip()) > width:
                found.append("")
            found[-1] += piece
        return [line.strip() for line in found]

    def _pieces(self, width: int) -> Iterator[str]:
        """Yield what a line may end behind: parts, and the words of those that are too long."""
        for part in _AFTER[0].split(self.text):
            if len(part.rstrip()) <= width:
                yield part
                continue
            for word in _AFTER[1].split(part):
                yield from (word[at : at + width] for at in range(0, len(word.rstrip()), width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n".join(self.lines(max(1, options.max_width))), no_wrap=True, overflow="ignore")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        words = (word for part in _AFTER[0].split(self.text) for word in _AFTER[1].split(part))
        least = max((len(word.strip()) for word in words), default=0)
        return Measurement(least, max(least, len(self.text))).with_maximum(options.max_width)
