"""What the commands share: lists on the command line, the folder of a result file, exit codes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text
from transformers.utils import logging as transformers_logging

from kvpress_eval.errors import EvalError, translated_os_errors
from kvpress_eval.interrupt import Terminated
from kvpress_eval.runner import INTERRUPTED

TERMINATED = 143
"""128 and the number of SIGTERM, as a shell reports a process that it ended."""

_PLAIN_WIDTH = 120
"""Columns of tables that go to a file or a pipe."""


def split(text: str | None) -> Sequence[str] | None:
    """Return the parts of a list that is separated by commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text is not None else None


def make_folder(out: Path | None) -> None:
    """Make the folder of a result file, before any work is done for it."""
    if out:
        with translated_os_errors(out.parent):
            out.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def exit_codes() -> Iterator[Console]:
    """Turn errors into a message and an exit code, and keep the libraries' own chatter off the terminal."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    terminal = Console()
    try:
        yield terminal if terminal.is_terminal else Console(width=_PLAIN_WIDTH)
    except EvalError as error:
        message = Text(f"error: {error}", style="red")
        Console(stderr=True, soft_wrap=True).print(message)
        raise typer.Exit(error.exit_code) from error
    except Terminated:
        raise typer.Exit(TERMINATED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
