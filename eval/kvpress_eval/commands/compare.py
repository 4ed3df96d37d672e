# SPDX-License-Identifier: Apache-2.0
"""`kvpress compare`: tokens that one press keeps and another loses, and answers that differ."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from kvpress_eval.commands import _shared as shared
from kvpress_eval.common.errors import ConfigError

if TYPE_CHECKING:
    from kvpress_eval.report.show import Shown


def command(
    first: Annotated[str, typer.Argument(metavar="A", help="A press such as snapkv:0.5.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another press.")],
    text: Annotated[
        Path | None, typer.Option(help="A text file, or - for standard input: which tokens of it each press keeps.")
    ] = None,
    run: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a finished `kvpress eval`: which answers differ; may be repeated."),
    ] = None,
    model: shared.Model = "reference",
    out: Annotated[Path, typer.Option(help="The page.")] = Path("compare.html"),
    tokens: Annotated[int | None, shared.token_count("tokens", "Read only so many tokens of the text.")] = None,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    model_kwargs: shared.ModelKwargs = None,
    threads: shared.Threads = None,
    force: shared.Force = False,
) -> None:
    """Compare two presses: the tokens of a text that one keeps and the other loses, and the answers that differ.

    The answers are those of finished runs, in which both presses answered the same samples under the same conditions; no model
    is loaded for them.
    """
    options = locals()
    with shared.exit_codes(loads_models=text is not None) as console:
        if text is None and not run:
            raise ConfigError("nothing to compare the presses on: give --text FILE, --run FOLDER, or both")
        if text is None and tokens is not None:
            raise ConfigError("tokens cuts the text of --text: give --text FILE too, or leave it out")
        from kvpress_eval.common.files import check_replaced, make_room, replace_file
        from kvpress_eval.report.compare import print_answers, print_tokens, to_html
        from kvpress_eval.results.answer_pairs import canonical, compare_answers
        from kvpress_eval.results.read import read_runs

        if canonical(first) == canonical(second):
            raise ConfigError(f"{first!r} and {second!r} are the same press: name two different ones")
        content = config = None
        if text is not None:
            from kvpress_eval.report.show import read_text

            # The text has the length that it has.
            config = shared.make_config(options, [first, second], 16)
            content = read_text(text, sys.stdin.buffer)
        make_room(out, "compare.html")
        check_replaced([out], [model, *([] if text is None else [text])], force, page="kvpress compare")
        presses = (first, second)
        answers = compare_answers(read_runs(run).cells, *presses) if run else None
        shown: list[Shown] = []
        record: dict[str, Any] = {}
        if config is not None and content is not None:
            from kvpress_eval.report.show import show

            shown, record = show(config, content, tokens)
            print_tokens(presses, shown, console)
        if answers is not None:
            print_answers(presses, answers, console)
        name = "standard input" if str(text) == "-" else text.name if text else ""
        replace_file(out, to_html(presses, shown, record, name, answers).encode("utf-8", "replace"))
        console.print(Text(f"wrote {out}"), soft_wrap=True)
