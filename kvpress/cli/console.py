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

from kvpress.counts import parse_count
from kvpress.signals import run_command

WRONG, UNREADABLE, UNWRITABLE = 2, 3, 4
"""Exit codes: what was asked for is wrong, a model or file cannot be read, the output cannot be written."""


class App(typer.Typer):
    """A command line that ends with the exit code of the first signal, however many follow."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_command(partial(super().__call__, *args, **kwargs))


def tokens(name: str, help: str, least: int = 1) -> Any:
    """Return an option that takes a number of tokens: 4096, 8k, 128k or 1M."""

    def parse(value: str | int) -> int:
        try:
            return parse_count(value, name, least)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return typer.Option(help=help, parser=parse, metavar="TOKENS")


@contextmanager
def shown() -> Iterator[None]:
    """Print what goes wrong with files, models and presses in one line, and keep the libraries' own chatter back.

    Exit codes are those of `docs/reliability.md`: 3 where a model or file cannot be read, else 2.
    """
    from kvpress.hf.models import quiet

    quiet()
    try:
        yield
    except (
        KeyError, ValueError, TypeError, OSError, ImportError, NotImplementedError, FloatingPointError,
    ) as error:  # fmt: skip
        fail(error)


def fail(error: Exception, code: int | None = None) -> NoReturn:
    """Print an error as it is, brackets included, and leave with an exit code, by default that of its kind."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else error
    Console(stderr=True, soft_wrap=True).print(Text(f"error: {message}", style="red"))
    if code is None:
        code = UNREADABLE if isinstance(error, OSError) else WRONG
    raise typer.Exit(code) from error


def new_console() -> Console:
    """Return a console for tables; a pipe has no width of its own, and gets one at which no cell is cut."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
