# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: one line per finished cell, and on a terminal a bar below them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from statistics import fmean
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from kvpress.terminal import print_text

_BAR = 16
"""Columns of the bar; the current label has the remainder of the line."""
_UNKNOWN = "-:--:--"
"""Remaining time before any work is finished."""


class JobProgress(Protocol):
    """Receiver of the progress of a job."""

    def start(self, label: str) -> None:
        """Show the label of the work that starts."""

    def cell(self, label: str) -> None:
        """Show the label of the current cell."""

    def advance(self, work: int) -> None:
        """Count finished work."""

    def skip(self, work: int) -> None:
        """Remove work that was done in an earlier run from the total."""

    def finished(self, label: str, scores: Sequence[float | None], seconds: float) -> None:
        """Report the scores and the time of a cell."""

    def problem(self, text: str) -> None:
        """Report a problem."""


class _RemainingTime(ProgressColumn):
    """Column with the remaining time, in the same format as the lines above the bar."""

    max_refresh = 0.5

    def __init__(self, remaining: Callable[[], str]) -> None:
        super().__init__()
        self._remaining = remaining

    def render(self, task: Task) -> Text:
        return Text(self._remaining(), style="progress.remaining")


class RunProgress:
    """Count work, show the current cell, and estimate the remaining time, at most until the monotonic time `until`."""

    def __init__(self, console: Console, total: int, until: float | None = None) -> None:
        self._console, self._until = console, until
        self._total, self._done, self._started = total, 0, time.monotonic()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=_BAR),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                _RemainingTime(self._remaining),
                TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")),
                console=console,
                transient=True,
                expand=True,
            )
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> RunProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def start(self, label: str) -> None:
        """Show the label of the work that starts."""
        if self._bar:
            self.cell(label)
        else:
            self.note(label)

    def cell(self, label: str) -> None:
        """Show the label of the current cell, if there is a bar."""
        if self._bar:
            self._bar.update(self._task, description=escape(label))

    def advance(self, work: int) -> None:
        """Count finished work."""
        self._done += work
        if self._bar:
            self._bar.advance(self._task, work)

    def skip(self, work: int) -> None:
        """Remove work that was done in an earlier run from the total, so that it does not distort the remaining time."""
        self._total -= work
        if self._bar:
            self._bar.update(self._task, total=self._total)

    def begin(self, total: int) -> None:
        """Start the count again at zero, for additional work without a time limit."""
        self._total, self._done, self._started, self._until = total, 0, time.monotonic(), None
        if self._bar:
            self._bar.reset(self._task, total=total)

    def finished(self, label: str, scores: Sequence[float | None], seconds: float) -> None:
        """Print the scores and the time of a cell; without a bar, also the remaining time."""
        scored = [value for value in scores if value is not None]
        mean = f"{100 * fmean(scored):.1f}%" if scored else "no score"
        remaining = "" if self._bar else f"; {self._remaining()} left"
        self.note(f"{label}: {len(scores)} samples, {mean}, answered in {seconds:.1f} s{remaining}")

    def reached(self, text: str) -> None:
        """Print a milestone with the remaining time."""
        self.note(f"{text}; {self._remaining()} left")

    def note(self, text: str) -> None:
        """Print a line, unless it is empty."""
        if text:
            print_text(self._console, text)

    def problem(self, text: str) -> None:
        """Print a problem in red."""
        self._console.print(Text(text, style="red"))

    def _remaining(self) -> str:
        missing, spent = self._total - self._done, time.monotonic() - self._started
        pace = spent / self._done if self._done > 0 else math.inf
        seconds = max(0.0, pace * missing) if missing else 0.0
        if self._until is not None:
            seconds = min(seconds, max(0.0, self._until - time.monotonic()))
        return _UNKNOWN if math.isinf(seconds) else str(timedelta(seconds=round(seconds)))
