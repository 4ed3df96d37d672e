"""How far a run is: a bar on a terminal, one line per cell anywhere else."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class RunProgress:
    """Counts samples and names the cell being worked on."""

    def __init__(self, console: Console, samples: int) -> None:
        self._console = console
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}"),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("", total=samples)

    def __enter__(self) -> RunProgress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def cell(self, label: str) -> None:
        """Name the cell that starts now."""
        if self._bar:
            self._bar.update(self._task, description=escape(label))
        else:
            self._console.print(label, markup=False, highlight=False)

    def advance(self, samples: int) -> None:
        """Count finished samples."""
        if self._bar:
            self._bar.advance(self._task, samples)

    def problem(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(f"[red]{escape(text)}[/red]")
