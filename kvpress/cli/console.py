# SPDX-License-Identifier: Apache-2.0
"""Console output and exit codes of commands."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from kvpress.cli.outputs import OutputRefusedError
from kvpress.counts import parse_count
from kvpress.signals import run_command

WRONG, UNREADABLE, UNWRITABLE, FULL = 2, 3, 4, 7
"""Exit codes: wrong arguments, unreadable model or file, unwritable output, full disk."""


class App(typer.Typer):
    """Command line that exits with the code of the first signal, even if further signals follow."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_command(partial(super().__call__, *args, **kwargs))


def tokens(name: str, help: str, least: int = 1) -> Any:
    """Return an option for a number of tokens: 4096, 8k, 128k or 1M."""

    def parse(value: str | int) -> int:
        try:
            return parse_count(value, name, least)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return typer.Option(help=help, parser=parse, metavar="TOKENS")


ModelKwargs = Annotated[
    str | None,
    typer.Option(
        help="Further arguments for loading the model, and attributes of its configuration: a JSON object, or "
        "name=value with commas between them, such as attn_implementation=eager."
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1; auto takes a GPU if there is one.")]


@contextmanager
def shown(models: bool = True, output: Path | None = None) -> Iterator[None]:
    """Print errors of files, models and presses as one line, and silence the progress output of libraries.

    Commands that use no model pass `models=False`, so that transformers is not imported. `output` is the file that a command
    writes. Exit codes are those of `docs/reliability.md`: 3 if a model or file cannot be read, 4 if the output cannot be
    written, 7 if the disk is full, else 2.
    """
    if models:
        from kvpress.hf.config import quiet

        quiet()
    try:
        yield
    except (
        KeyError, ValueError, TypeError, OSError, ImportError, NotImplementedError, FloatingPointError,
    ) as error:  # fmt: skip
        if not isinstance(error, OSError) or output is None:
            fail(error)
        if _is_full(error):
            fail(OSError(f"no space left for {output}: {error.strerror}; free some and start again"), FULL)
        fail(error, UNWRITABLE if _belongs_to(error.filename, output) else UNREADABLE)


def fail(error: Exception, code: int | None = None) -> NoReturn:
    """Print an error, with brackets unchanged, and exit with `code`, by default the code of the error type."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else error
    Console(stderr=True, soft_wrap=True).print(Text(f"error: {message}", style="red"))
    if code is None:
        code = (
            UNWRITABLE if isinstance(error, OutputRefusedError) else UNREADABLE if isinstance(error, OSError) else WRONG
        )
    raise typer.Exit(code) from error


def _is_full(error: OSError) -> bool:
    """Whether an error is that of a full disk."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _belongs_to(name: Any, output: Path) -> bool:
    """Whether a file name in an error is that of an output, of its folder, or of a file that is written for it beside it."""
    if not isinstance(name, (str, os.PathLike)):
        return False
    path, output = Path(name).absolute(), output.absolute()
    return path in output.parents or str(path).startswith((str(output), str(output.with_name(f".{output.name}"))))


def new_console() -> Console:
    """Return a console for tables; output to a pipe is wide enough that no cell is cut."""
    console = Console()
    return console if console.is_terminal else Console(width=160)
