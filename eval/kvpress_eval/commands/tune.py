# SPDX-License-Identifier: Apache-2.0
"""`kvpress tune`: find a press for a memory limit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from kvpress.terminal import print_text
from kvpress_eval.commands import _shared as shared

if TYPE_CHECKING:
    from kvpress_eval.tuning.result import Tuned

_LISTS = ("tasks", "lengths")
_WISHES = (
    "memory", "smaller", "max_drop", "confidence", "context", "batch", "held_out", "candidates", "minutes", "data", "status",
)  # fmt: skip
_LENGTH = 1024
_MISSED = 1


def command(
    model: shared.Model = "reference",
    memory: Annotated[
        str | None, typer.Option(help="Limit for weights and cache together, such as 4GB or 512MiB.")
    ] = None,
    smaller: Annotated[
        float | None, typer.Option(help="Instead of --memory: factor by which the cache shrinks.")
    ] = None,
    max_drop: Annotated[
        float | None, typer.Option(help="Points that the worst task may lose: picks the smallest such press.")
    ] = None,
    confidence: Annotated[
        float | None,
        typer.Option(help="Guarantee, such as 0.95, that at most --max-drop points (5 without it) are lost."),
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Names separated by commas; default: generated tasks.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Your own .jsonl: context, question, answer; or text, scored by likelihood.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help=f"Context lengths in tokens, separated by commas; default: {_LENGTH}.")
    ] = None,
    context: Annotated[
        int | None, shared.token_count("context", "Tokens that --memory is for; default: the longest length.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences of such a context at a time.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for the press; a killed search continues there.")] = Path("best"),
    samples: Annotated[int, typer.Option(help="Contexts of each task that are searched on.", min=2)] = 32,
    held_out: Annotated[int, typer.Option(help="Further contexts of each task that decide the printed figures.")] = 24,
    candidates: Annotated[int, typer.Option(help="Points of the space that are tried.")] = 96,
    status: Annotated[
        str | None, typer.Option(help="Only presses of these statuses, such as recommended; default: all presses.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Longest search; measuring the best comes on top. Default: no limit.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the search and of the generated contexts.")] = 0,
    language: Annotated[str, typer.Option(help="Wording of the tasks: auto, reference or english.")] = "auto",
    question_aware: Annotated[
        bool, typer.Option("--question-aware/--question-unaware", help="Compress after the question.")
    ] = False,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the files of published benchmarks.")] = None,
    max_context_length: shared.MaxContextLength = None,
    batch_size: Annotated[int, typer.Option(help="Contexts that are read together.")] = 1,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    device_map: Annotated[
        str | None, typer.Option(help="Spread the layers over all devices: auto, balanced or sequential.")
    ] = None,
    model_kwargs: shared.ModelKwargs = None,
    threads: shared.Threads = None,
    engine: Annotated[str, typer.Option(help="local, or ray: the machines of a cluster search.")] = "local",
    ray_address: shared.RayAddress = None,
) -> None:
    """Find the press that fits a memory limit and loses least, and write it for `get_press` and `--press @FILE`.

    The worst of the tasks decides. The printed figures come from samples that the search has not seen.
    """
    options = {name: value for name, value in locals().items() if value is not None}
    with shared.exit_codes() as console:
        from kvpress.signals import INTERRUPTED, Terminated
        from kvpress_eval.config.load import load_config
        from kvpress_eval.report.write import check_folder
        from kvpress_eval.tuning.find import tune
        from kvpress_eval.tuning.wishes import Wishes

        wishes = Wishes(**{name: options.pop(name) for name in _WISHES if name in options})
        settings: dict[str, Any] = {
            name: shared.split(value) if name in _LISTS else value for name, value in options.items()
        }
        config = load_config(None, {"lengths": (_LENGTH,), **settings})
        if tasks is None and data is None:
            note = f"no --data and no --tasks: tuning on generated tasks ({', '.join(config.tasks)})"
            print_text(console, note)
        check_folder(config.out)
        try:
            tuned = tune(config, wishes, console)
        except Terminated:
            raise
        except KeyboardInterrupt:
            console.print("interrupted; the same command continues where this search stopped")
            raise typer.Exit(INTERRUPTED) from None
        show(tuned, console)
        if tuned.kept is False:
            raise typer.Exit(_MISSED)


def show(tuned: Tuned, console: Console) -> None:
    """Print the frontier, the paths of the written files, and a sentence about the pick."""
    from kvpress_eval.report.write import write_outputs
    from kvpress_eval.results.read import is_run
    from kvpress_eval.tuning.result import print_frontier

    print_frontier(tuned.frontier, tuned.press, console)
    out = tuned.path.parent
    page = out / "report.html"
    if is_run(out):
        shared.print_written(page, write_outputs([out], page), console)
    console.print(Text(f"wrote {tuned.path}"), soft_wrap=True)
    print_text(console, tuned.sentence, "bold")
