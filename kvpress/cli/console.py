# SPDX-License-Identifier: Apache-2.0
"""How commands print, and what they say when they fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from kvpress.signals import run_command


class App(typer.Typer):
    """A command line that ends with the exit code of the first signal, however many follow."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_command(partial(super().__call__, *args, **kwargs))


@contextmanager
def shown() -> Iterator[None]:
    """Print what goes wrong with files, models and presses in one line, and keep the libraries' own chatter back."""
    from kvpress.hf.models import quiet

    quiet()
    try:
        yield
    except (
        KeyError, ValueError, TypeError, OSError, ImportError, NotImplementedError, FloatingPointError,
    ) as error:  # fmt: skip
        fail(error)


def fail(error: Exception) -> NoReturn:
    """Print an error as it is, brackets included, and leave."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else error
    Console(stderr=True, soft_wrap=True).print(Text(f"error: {message}", style="red"))
    raise typer.Exit(2) from error


def new_console() -> Console:
    """Return a console for tables; a pipe has no width of its own, and gets one at which no cell is cut."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
