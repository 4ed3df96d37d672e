"""`kvpress fidelity`: how close presses stay to the full cache on running text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvpress_eval.commands.terminal import exit_codes, make_folder
from kvpress_eval.fidelity import measure, to_layer_table, to_table
from kvpress_eval.store import write_json
from kvpress_eval.yaml_config import load_config


def fidelity_command(
    model: Annotated[str, typer.Option(help="`reference`, a local folder or a hub name.")] = "reference",
    press: Annotated[list[str] | None, typer.Option(help="A press such as kivi:bits=4; may be repeated.")] = None,
    context: Annotated[int, typer.Option(help="Tokens that are read in one pass and compressed.", min=16)] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens that follow.", min=2)] = 512,
    chunk: Annotated[int, typer.Option(help="Tokens of these that are read at a time.", min=1)] = 1,
    layers: Annotated[bool, typer.Option("--layers", help="Also measure every layer: errors, attention read.")] = False,
    samples: Annotated[int, typer.Option(help="Texts.")] = 4,
    text: Annotated[Path | None, typer.Option(help="Text file, or .jsonl with `text`; default: the tasks.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the generated texts.")] = 0,
    language: Annotated[str, typer.Option(help="Wording of the generated texts: auto, reference or english.")] = "auto",
    batch_size: Annotated[int, typer.Option(help="Texts that are read together.")] = 4,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
) -> None:
    """Measure how close presses stay to the full cache while a text is continued, without labels.

    The context is read in one pass and compressed, its continuation one token at a time through the compressed cache, or
    in chunks. A perplexity from one pass over the text would show nothing: that pass never reads what a press has stored.
    """
    options: dict[str, Any] = {
        "model": model,
        "presses": tuple(press or ("none",)),
        "lengths": (context,),
        "samples": samples,
        "seed": seed,
        "language": language,
        "batch_size": batch_size,
        "dtype": dtype,
        "device": device,
        "threads": threads,
    }
    with exit_codes() as console:
        record = compare(options, tokens, text, out, console, chunk, layers)
        if out:
            write_json(out, record)


def compare(
    options: dict[str, Any],
    tokens: int,
    text: Path | None,
    out: Path | None,
    console: Console,
    chunk: int = 1,
    layers: bool = False,
) -> dict[str, Any]:
    """Measure fidelity and print it; the folder of `out` is made before any work."""
    config = load_config(None, options)
    make_folder(out)
    record = measure(config, tokens, text, console, chunk, layers)
    console.print(to_table(record["rows"]))
    if layers:
        console.print()
        console.print(to_layer_table(record["rows"]))
    return record
