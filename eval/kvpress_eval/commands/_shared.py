# SPDX-License-Identifier: Apache-2.0
"""Helpers shared by the commands: options, their configuration, errors and exit codes.

Modules that need torch are imported by a command when it runs, so that `kvpress --help` need not wait for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from kvpress_eval.common.errors import EvalError

if TYPE_CHECKING:
    from kvpress_eval.config.schema import RunConfig

Model = Annotated[str, typer.Option(help="`reference`, `smollm2`, a .gguf file, a folder or a hub name.")]
Samples = Annotated[int, typer.Option(help="Texts.")]
RealText = Annotated[
    str | None,
    typer.Option(help="essays, stdlib, bfcl, human_eval, a text file, or .jsonl with `text`; default: the tasks."),
]
FigureFile = Annotated[Path | None, typer.Option(help="JSON file for the figures.")]
Force = Annotated[bool, typer.Option("--force", help="Replace files that are there.")]
Seed = Annotated[int, typer.Option(help="Seed of the generated texts.")]
BatchSize = Annotated[int, typer.Option(help="Texts that are read together.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
ModelKwargs = Annotated[
    str | None,
    typer.Option(
        help="Further arguments for loading the model, and attributes of its configuration: a JSON object, or "
        "name=value with commas between them, such as attn_implementation=eager."
    ),
]
Threads = Annotated[int | None, typer.Option(help="CPU threads of torch.")]


def token_count(name: str, help: str, least: int = 1) -> Any:
    """Return an option that takes a number of tokens: 4096, 8k, 128k or 1M."""

    def parse(value: str | int) -> int:
        from kvpress.counts import parse_count

        try:
            return parse_count(value, name, least)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return typer.Option(help=help, parser=parse, metavar="TOKENS")


def _parse_press_seconds(value: str | float) -> float:
    from kvpress.counts import parse_seconds

    try:
        return parse_seconds(value, "press-seconds")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


PressSeconds = Annotated[
    float | None,
    typer.Option(
        help="Seconds of a press over all contexts; one that has used more skips its further contexts. Default: no limit.",
        parser=_parse_press_seconds,
        metavar="SECONDS",
    ),
]
MaxContextLength = Annotated[
    int | None,
    token_count("max_context_length", "Longest context, chat template included; longer ones lose their middle.", 16),
]
RayAddress = Annotated[
    str | None, typer.Option(help="HOST:PORT of a Ray cluster, or auto; default: one that is started here.")
]

_FIELDS = (
    "model", "samples", "seed", "filler", "language", "question_aware", "batch_size", "dtype", "device", "model_kwargs",
    "threads",
)  # fmt: skip
"""Options with the same meaning in several commands."""
_PLAIN_WIDTH = 120
"""Columns of tables in a file or a pipe."""


def make_config(options: Mapping[str, Any], presses: Sequence[str] | None, *lengths: int | str) -> RunConfig:
    """Return the configuration of a command that measures presses at some lengths, from its options."""
    from kvpress_eval.config.load import load_config

    settings = {name: options[name] for name in _FIELDS if options.get(name) is not None}
    config = load_config(None, {**settings, "presses": presses or ("none",), "lengths": lengths})
    print_sizes(config.presses)
    return config


def print_sizes(presses: Sequence[str]) -> None:
    """Print the default sizes of presses whose specs give none."""
    from kvpress.core.effect import assumed_sizes
    from kvpress.core.spec import get_press

    for spec in presses:
        for note in assumed_sizes(get_press(spec)):
            Console(stderr=True, soft_wrap=True).print(Text(note))


def print_written(page: Path, files: Sequence[Path], console: Console) -> None:
    """Print the page to open, and the names of the files beside it on one line."""
    console.print(Text(f"open {page}"), soft_wrap=True)
    beside = sorted(path.name for path in files if path != page)
    if beside:
        console.print(Text(f"beside it: {', '.join(beside)}", style="dim"), soft_wrap=True)


def print_stopped(record: Mapping[str, Any], console: Console) -> None:
    """Print a sentence for each press that was stopped by the limit on its time."""
    from kvpress.terminal import print_text

    for stopped in record["stopped"]:
        print_text(console, stopped["sentence"])


@contextmanager
def continuable(out: Path | None, console: Console) -> Iterator[None]:
    """After Ctrl-C print that the same command continues, if rows are stored beside `out`."""
    from kvpress.signals import INTERRUPTED, Terminated

    try:
        yield
    except Terminated:
        raise
    except KeyboardInterrupt:
        if out:
            console.print("interrupted; the same command continues where this one stopped")
        raise typer.Exit(INTERRUPTED) from None


def split(text: str) -> list[str]:
    """Return the items of a comma-separated list."""
    return [part.strip() for part in text.split(",") if part.strip()]


@contextmanager
def exit_codes(*, loads_models: bool = True) -> Iterator[Console]:
    """Turn errors into a message and an exit code, and suppress the log output of libraries."""
    from kvpress.signals import INTERRUPTED, TERMINATED, Terminated

    terminal = Console()
    try:
        if loads_models:
            from transformers.utils import logging

            logging.disable_progress_bar()
            logging.set_verbosity_error()
        yield terminal if terminal.is_terminal else Console(width=_PLAIN_WIDTH)
    except EvalError as error:
        _fail(str(error), error.exit_code, error)
    except ModuleNotFoundError as error:
        if str(error.name).startswith("kvpress"):
            raise
        _fail(f"{error.name} is not installed; measuring needs: pip install 'kvpress-toolkit[eval]'", 2, error)
    except Terminated:
        Console(stderr=True, soft_wrap=True).print(
            "stopped by SIGTERM; finished results are on disk, and the same command continues from there"
        )
        raise typer.Exit(TERMINATED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _fail(message: str, code: int, error: Exception) -> None:
    Console(stderr=True, soft_wrap=True).print(Text(f"error: {message}", style="red"))
    raise typer.Exit(code) from error
