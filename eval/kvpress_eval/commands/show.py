"""`kvpress show`: which tokens of a text presses keep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from kvpress_eval.commands.terminal import exit_codes, make_folder
from kvpress_eval.errors import OutputError
from kvpress_eval.show import read_text, show, to_html
from kvpress_eval.store import replace_file
from kvpress_eval.yaml_config import load_config


def show_command(
    press: Annotated[list[str], typer.Option(help="A press such as snapkv:0.5; may be repeated.")],
    text: Annotated[Path, typer.Option(help="A text file, or - for standard input.")],
    model: Annotated[str, typer.Option(help="`reference`, a local folder or a hub name.")] = "reference",
    out: Annotated[Path, typer.Option(help="The page.")] = Path("show.html"),
    tokens: Annotated[int | None, typer.Option(help="Read only so many tokens of the text.", min=1)] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
) -> None:
    """Write one HTML page that shows which tokens of a text each layer and head keeps."""
    options: dict[str, Any] = {
        "model": model,
        "presses": tuple(press),
        "lengths": (16,),  # the text has the length that it has
        "dtype": dtype,
        "device": device,
        "threads": threads,
    }
    with exit_codes() as console:
        config = load_config(None, options)
        content = read_text(text, sys.stdin.buffer)
        if out.is_dir():
            raise OutputError(f"{out} is a folder; name a file such as {out / 'show.html'}")
        make_folder(out)
        shown, record = show(config, content, tokens)
        name = "standard input" if str(text) == "-" else text.name
        replace_file(out, to_html(shown, record, name).encode("utf-8", "replace"))
        for item in shown:
            console.print(Text(f"{item.press}: {', '.join(item.notes)}; {item.memory.bits_per_value:.1f} bits/value"))
        console.print(Text(f"wrote {out}"), soft_wrap=True)
