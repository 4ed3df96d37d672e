"""`kvpress divergence`: how far presses move the next-token distributions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvpress_eval.commands.terminal import exit_codes, make_folder
from kvpress_eval.divergence import measure, to_table
from kvpress_eval.store import write_json
from kvpress_eval.yaml_config import load_config


def divergence_command(
    model: Annotated[str, typer.Option(help="`reference`, a local folder or a hub name.")] = "reference",
    press: Annotated[list[str] | None, typer.Option(help="A press such as kivi:bits=4; may be repeated.")] = None,
    context: Annotated[int, typer.Option(help="Tokens that are read in one pass and compressed.", min=16)] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens that follow, one at a time.", min=1)] = 512,
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
    """Measure how far presses move the next-token distributions while a text is continued.

    The context is read in one pass and compressed, its continuation one token at a time through the compressed cache. A
    perplexity from one pass over the text would show nothing: that pass never reads what a press has stored.
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
        record = diverge(options, tokens, text, out, console)
        if out:
            write_json(out, record)


def diverge(
    options: dict[str, Any], tokens: int, text: Path | None, out: Path | None, console: Console
) -> dict[str, Any]:
    """Measure divergence and print it; the folder of `out` is made before any work."""
    config = load_config(None, options)
    make_folder(out)
    record = measure(config, tokens, text, console)
    console.print(to_table(record["rows"]))
    return record
