# SPDX-License-Identifier: Apache-2.0
"""`kvpress fidelity`: how close presses stay to the full cache on running text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvpress_eval.commands import _shared as shared

if TYPE_CHECKING:
    from kvpress_eval.config.schema import RunConfig


def command(
    model: shared.Model = "reference",
    press: Annotated[list[str] | None, typer.Option(help="A press such as kivi:bits=4; may be repeated.")] = None,
    context: Annotated[
        int, shared.token_count("context", "Tokens that are read in one pass and compressed.", least=16)
    ] = 1024,
    tokens: Annotated[int, shared.token_count("tokens", "Tokens that follow.", least=2)] = 512,
    chunk: Annotated[int, shared.token_count("chunk", "Tokens of these that are read at a time.")] = 1,
    layers: Annotated[bool, typer.Option("--layers", help="Also measure every layer: errors, attention read.")] = False,
    samples: shared.Samples = 4,
    text: shared.RealText = None,
    press_seconds: shared.PressSeconds = None,
    out: shared.FigureFile = None,
    seed: Annotated[int, typer.Option(help="Seed of generated texts, and of the order of documents.")] = 0,
    language: Annotated[str, typer.Option(help="Wording of the generated texts: auto, reference or english.")] = "auto",
    batch_size: shared.BatchSize = 4,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    model_kwargs: shared.ModelKwargs = None,
    threads: shared.Threads = None,
    force: shared.Force = False,
) -> None:
    """Measure the difference between presses and the full cache on the continuation of a text, without labels.

    The context is read in one pass and compressed. Its continuation is read through the compressed cache, one token at a time
    or in chunks. A perplexity from one pass over the text would show no difference, because that pass never reads the
    compressed cache. With --out, the same command continues a measurement that was stopped.
    """
    options = locals()
    with shared.exit_codes() as console:
        from kvpress_eval.common.files import write_json

        config = shared.make_config(options, press, context)
        record = compare(
            config, tokens, text, out, force, console, chunk=chunk, layers=layers, press_seconds=press_seconds
        )
        if out:
            write_json(out, record)


def compare(
    config: RunConfig,
    tokens: int,
    text: str | None,
    out: Path | None,
    force: bool,
    console: Console,
    *,
    chunk: int = 1,
    layers: bool = False,
    press_seconds: float | None = None,
) -> dict[str, Any]:
    """Measure fidelity and print it; `out` is checked, and its folder made, before any work. Rows are stored beside it."""
    from kvpress_eval.common.files import check_replaced, make_room
    from kvpress_eval.fidelity.measure import measure
    from kvpress_eval.report.comparison_tables import fidelity_table, layer_table
    from kvpress_eval.results.store import rows_folder

    if out:
        make_room(out, "figures.json")
        check_replaced([out], [config.model, *([text.removeprefix("file:")] if text else [])], force)
    with shared.continuable(out, console):
        record = measure(
            config, tokens, text, console, chunk, layers, folder=out and rows_folder(out), press_seconds=press_seconds
        )
    if record["rows"]:
        console.print(fidelity_table(record["rows"]))
    if record["rows"] and layers:
        console.print()
        console.print(layer_table(record["rows"]))
    shared.print_stopped(record, console)
    return record
