"""`kvpress reselect`: the layer in which TidalDecode should choose positions again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from kvpress_eval.commands.fidelity import compare
from kvpress_eval.commands.terminal import exit_codes
from kvpress_eval.errors import ConfigError
from kvpress_eval.reselect import best, candidates
from kvpress_eval.store import write_json


def reselect_command(
    model: Annotated[str, typer.Option(help="`reference`, a local folder or a hub name.")] = "reference",
    budget: Annotated[
        str, typer.Option(help="Pairs that are read, or a fraction of them; small ones tell more.")
    ] = "64",
    skip_layers: Annotated[int, typer.Option(help="The layer that chooses first.", min=0)] = 2,
    heads: Annotated[str, typer.Option(help="mean, max or query.")] = "mean",
    context: Annotated[int, typer.Option(help="Tokens that are read in one pass.", min=16)] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens that follow, one at a time.", min=2)] = 128,
    samples: Annotated[int, typer.Option(help="Texts.")] = 8,
    text: Annotated[Path | None, typer.Option(help="Text file, or .jsonl with `text`; default: the tasks.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the generated texts.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Texts that are read together.")] = 4,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
) -> None:
    """Find the layer in which TidalDecode should choose positions again, by trying all of a model.

    Every layer behind the one that chooses first is tried on the same texts; the best moves the next-token distributions
    least from those of the full cache.
    """
    with exit_codes() as console:
        presses = candidates(model, _number(budget), skip_layers, heads)
        options: dict[str, Any] = {
            "model": model,
            "presses": tuple(presses),
            "lengths": (context,),
            "samples": samples,
            "seed": seed,
            "batch_size": batch_size,
            "dtype": dtype,
            "device": device,
            "threads": threads,
        }
        record = compare(options, tokens, text, out, console)
        chosen = best(record["rows"])
        console.print(Text(f"best: {chosen}"))
        if out:
            write_json(out, {**record, "best": chosen})


def _number(text: str) -> float:
    """Read a whole number or a fraction."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise ConfigError(f"budget must be a whole number of pairs, or a fraction in (0, 1), got {text!r}") from None
