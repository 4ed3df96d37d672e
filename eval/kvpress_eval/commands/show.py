# SPDX-License-Identifier: Apache-2.0
"""`kvpress show`: which tokens of a text presses keep."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from kvpress_eval.commands import _shared as shared


def command(
    press: Annotated[list[str], typer.Option(help="A press such as snapkv:0.5; may be repeated.")],
    text: Annotated[Path, typer.Option(help="A text file, or - for standard input.")],
    model: shared.Model = "reference",
    out: Annotated[Path, typer.Option(help="The page.")] = Path("show.html"),
    tokens: Annotated[int | None, shared.token_count("tokens", "Read only so many tokens of the text.")] = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    model_kwargs: shared.ModelKwargs = None,
    threads: shared.Threads = None,
    force: shared.Force = False,
) -> None:
    """Write one HTML page that shows which tokens of a text each layer and head keeps."""
    options = locals()
    with shared.exit_codes() as console:
        from kvpress_eval.common.files import check_replaced, make_room, replace_file
        from kvpress_eval.report.show import read_text, show, to_html

        # The text has the length that it has.
        config = shared.make_config(options, press, 16)
        content = read_text(text, sys.stdin.buffer)
        make_room(out, "show.html")
        check_replaced([out], [model, text], force, page="kvpress show")
        shown, record = show(config, content, tokens)
        name = "standard input" if str(text) == "-" else text.name
        replace_file(out, to_html(shown, record, name).encode("utf-8", "replace"))
        for item in shown:
            console.print(Text(f"{item.press}: {', '.join(item.notes)}; {item.memory.bits_per_value:.1f} bits/value"))
        console.print(Text(f"wrote {out}"), soft_wrap=True)
