# SPDX-License-Identifier: Apache-2.0
"""Command line `kvpress`. The package `kvpress_eval` adds further commands, such as `kvpress eval`.

Commands import modules that need torch when they run, so that `kvpress --help` is fast.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpress import __version__
from kvpress.cli.caches import ask_command, compress_command, info_command
from kvpress.cli.calibrate import calibrate_app
from kvpress.cli.console import UNWRITABLE, App, fail, new_console, shown, tokens
from kvpress.cli.doctor import doctor_command
from kvpress.cli.outputs import check_outputs
from kvpress.core.registry import ORDER, STATUSES
from kvpress.terminal import Name, print_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpress.core.listing import ListedPress
    from kvpress.plan import Geometry, Plan

app = App(
    name="kvpress",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Compress the key-value cache of language models, and measure what it saves and costs.",
)

PLANNED = (
    "none", "snapkv:0.5", "snapkv:0.75", "snapkv:0.9", "adakv(expected_attention:0.5,epsilon=0.02)", "snapkv:budget=1024",
    "kivi:bits=8", "kivi:bits=4", "kivi:bits=2", "quest:budget=1024", "expected_attention:0.5,epsilon=0.02 + kivi:bits=4",
    "expected_attention:0.5,epsilon=0.02 + kivi:bits=2 + quest:budget=1024", "bounded(keydiff:0.9)", "frontier:smaller=10",
)  # fmt: skip

_CONTEXT = 131072
"""Largest default context of a plan, in tokens."""
_WIDE = 100
"""Fewest terminal columns for a table with lines."""
_TAIL = 0.05
"""Share of a cache in pairs that fill no tile, from which on a plan prints a note."""
_PLAIN: dict[str, Any] = {"box": None, "padding": (0, 1, 0, 0)}


def _print_version(is_requested: bool) -> None:
    if is_requested:
        Console().print(f"kvpress {__version__}")
        raise typer.Exit


@app.callback()
def main(
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", help="A module or .py file with presses of your own; may be repeated."),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Import the modules with the user's presses before the command runs."""
    if modules:
        sys.path.insert(0, "")
    for module in modules or ():
        try:
            _import_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
        except Exception as error:  # a user's module may raise any error
            fail(ValueError(f"--import {module}: {type(error).__name__}: {error}"))


def _import_file(path: Path) -> None:
    """Import a file under its own name, by which other processes import the module when they load its presses."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.import_module(path.stem)
    if Path(module.__file__ or "").resolve() != path.resolve():
        raise ImportError(f"{path.stem} is the name of another module, {module.__file__}: rename the file")


@app.command("list")
def list_command(
    words: Annotated[list[str] | None, typer.Argument(help="Only presses with all these words in their row.")] = None,
    status: Annotated[str | None, typer.Option(help=f"Only presses of one status: {', '.join(STATUSES)}.")] = None,
    role: Annotated[str | None, typer.Option(help=f"Only presses of one role: {', '.join(ORDER)}.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """List all presses with role, status, summary and paper."""
    from kvpress.core.listing import listed

    for name, value, allowed in (("status", status, tuple(STATUSES)), ("role", role, ORDER)):
        if value is not None and value not in allowed:
            raise typer.BadParameter(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    rows = [
        line
        for line in listed()
        if status in (None, line.status)
        and role in (None, line.role)
        and all(word.lower() in " ".join(asdict(line).values()).lower() for word in words or ())
    ]
    if as_json:
        typer.echo(json.dumps([asdict(line) for line in rows], indent=1))
        return
    if not rows:
        raise typer.BadParameter("no press matches; `kvpress list` shows all")
    console = new_console()
    console.print(_wide_list(rows) if console.width >= _WIDE else _narrow_list(rows))
    if console.width < _WIDE:
        console.print(Text("papers: a terminal of 100 columns and more, or --json"))
    if status is None:
        for name, meaning in STATUSES.items():
            print_text(console, f"{name}: {meaning}")


def _wide_list(rows: Sequence[ListedPress]) -> Table:
    """Return a table with a column for each field."""
    table = Table()
    for column in ("press", "role", "status", "what it does", "paper"):
        table.add_column(column, no_wrap=column in ("press", "role", "status"))
    for line in rows:
        table.add_row(*map(Text, (line.name, line.role, line.status, line.summary, line.paper or "-")))
    return table


def _narrow_list(rows: Sequence[ListedPress]) -> Table:
    """Return a table without lines and papers, with role and status below each other."""
    table = Table(**_PLAIN)
    for column in ("press", "role, status", "what it does"):
        table.add_column(column, no_wrap=column != "what it does")
    for line in rows:
        table.add_row(Text(line.name), Text(f"{line.role}\n{line.status}"), Text(line.summary))
    return table


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Option(help="`reference`, a folder, a config.json, or a hub name.")],
    context: Annotated[
        int | None, tokens("context", "Tokens in each sequence; default: the positions of the model, at most 128k.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at a time.", min=1)] = 1,
    generated: Annotated[int, tokens("generated", "Tokens generated after them.", least=0)] = 0,
    press: Annotated[list[str] | None, typer.Option(help="Press spec; may be repeated. Default: a selection.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory for weights and cache, such as 24GB; adds the longest context that fits.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Print the predicted cache memory of a model with each method, and the peak while it reads a prompt."""
    from kvpress.cache.report import format_bytes, parse_bytes
    from kvpress.core.effect import assumed_sizes, check_acts, left_whole, left_whole_note
    from kvpress.core.spec import get_press, spelled_out
    from kvpress.hf.config import load_config
    from kvpress.plan import LONGEST, Geometry, longest_context, plan

    room = None
    longest: list[int] = []
    with shown(output=out):
        if out is not None:
            if out.is_dir() or not out.absolute().parent.is_dir():
                message = f"{out} is a folder, or its parent folder does not exist: pass the name of a file"
                fail(OSError(message), UNWRITABLE)
            check_outputs([out], [model], force)
        settings = load_config(model)
        geometry = Geometry.of(settings)
        if context is None:
            context = max(1, min(_CONTEXT, (geometry.positions or _CONTEXT + generated) - generated))
        specs = list(map(spelled_out, press or PLANNED))
        for spec in specs:
            check_acts(get_press(spec))
        rows = [(spec, plan(get_press(spec), geometry, context, batch, generated)) for spec in specs]
        if memory is not None:
            from kvpress.hf.stored_weights import (
                bytes_of_weights,
            )  # builds the model without memory: all of transformers

            weights = bytes_of_weights(model, settings, geometry.dtype)
            room = parse_bytes(memory, "memory") - weights
            if room <= 0:
                raise ValueError(f"memory {memory} does not hold the weights of the model, {format_bytes(weights)}")
            max_tokens = LONGEST if geometry.positions is None else max(0, geometry.positions - generated)
            longest = [
                min(max_tokens, longest_context(get_press(spec), geometry, room, batch, generated)) for spec, _ in rows
            ]
        if out is not None:
            plans: list[dict[str, Any]] = [
                {"press": spec, "smaller": planned.factor, **asdict(planned)} for spec, planned in rows
            ]
            if longest:
                plans = [
                    {**entry, "longest_context": max_tokens} for entry, max_tokens in zip(plans, longest, strict=True)
                ]
            arguments = {"model": model, "context": context, "batch": batch, "generated": generated}
            figures = {
                **arguments,
                "positions": geometry.positions,
                "cache_bytes_allowed": room,
                "presses": plans,
            }
            out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    length = f"{context} + {generated}" if generated else f"{context}"
    title = f"{model}: {batch} x {length} tokens, {geometry.dtype}".replace("torch.", "")
    console = new_console()
    table = Table(title=Text(title, style="table.title"), **({} if console.width >= _WIDE else _PLAIN))
    table.add_column("press")
    for column in ("times\nsmaller", "pairs\nper head", "cache", "peak, read\nat once", "peak, in\nchunks"):
        table.add_column(column, justify="right", no_wrap=True)
    if room is not None:
        table.add_column("longest\ncontext", justify="right", no_wrap=True)
    for index, (spec, planned) in enumerate(rows):
        sizes = map(format_bytes, (planned.total_bytes, planned.peak_bytes, planned.chunked_peak_bytes))
        fits = [f"{max_tokens:,}" if max_tokens < LONGEST else "any" for max_tokens in longest[index : index + 1]]
        table.add_row(Name(spec), f"{planned.factor:.2f}", f"{planned.pairs_per_head:,}", *sizes, *fits)
    console.print(table)
    if rows and rows[0][1].shrinking < 1:
        share = rows[0][1].shrinking
        message = f"layers with a sliding window are not compressed: {share:.0%} of the cache can shrink, so it gets "
        print_text(console, message + f"at most {1 / (1 - share):.1f} times smaller")
    if note := _note_on_positions(geometry, context, generated, longest):
        print_text(console, note)
    for spec, planned in rows:
        sizes_of_rows = planned.pairs_per_head / (context + generated), planned.total_bytes, planned.uncompressed_bytes
        notes = [f"{spec}: {left_whole_note(get_press(spec))}"] if left_whole(get_press(spec), *sizes_of_rows) else []
        for note in (*assumed_sizes(get_press(spec)), *notes):
            print_text(console, note)
        if planned.decode_peak_bytes > planned.total_bytes:
            print_text(
                console,
                f"{spec}: the cache grows to {format_bytes(planned.decode_peak_bytes)} between evictions while tokens are "
                "generated",
            )
        share = planned.tail_bytes / planned.total_bytes
        if share >= _TAIL:
            message = (
                f"{spec}: {share:.0%} of the cache is pairs that stay dense because they fill no tile of the codec; "
            )
            message += "a slightly larger budget may take less memory"
            print_text(console, message)
    if room is not None:
        text = f"weights {format_bytes(weights)}, which leaves {format_bytes(room)} for the cache and the activations of a pass"
        print_text(console, f"{memory}: {text}\n{_verdict(rows, longest, room, context)}")


def _note_on_positions(geometry: Geometry, context: int, generated: int, longest: Sequence[int]) -> str:
    """Return a note if a plan exceeds the positions of a model or uses all of them, else an empty string."""
    limit, tokens = geometry.positions, context + generated
    if limit is None:
        return ""
    if tokens > limit:
        return (
            f"{tokens:,} tokens exceed the {limit:,} positions of {geometry.name}: the sizes are correct, but answers beyond "
            f"these positions are not reliable; pass --context {max(1, limit - generated)} or less"
        )
    if longest and max(longest) + generated == limit:
        return f"the longest context is limited by the {limit:,} positions of {geometry.name}"
    return ""


def _verdict(rows: Sequence[tuple[str, Plan]], longest: Sequence[int], room: int, context: int) -> str:
    """Return a line with the press that compresses least and still fits."""
    from kvpress.cache.report import format_bytes

    fitting = [(planned.factor, spec) for spec, planned in rows if planned.needed_bytes <= room]
    if not fitting:
        longest_fit, spec = max(zip(longest, (spec for spec, _ in rows), strict=True))
        return f"None of these fits {context:,} tokens; {spec} fits up to {longest_fit:,}."
    factor, spec = min(fitting)
    full = next((planned for name, planned in rows if name == "none"), None)
    if full is not None and full.needed_bytes <= room:
        return f"{context:,} tokens fit without a press."
    needs = "" if full is None else f" do not fit without a press, which takes {format_bytes(full.needed_bytes)}; they"
    return (
        f"{context:,} tokens{needs} fit with {spec}, {factor:.1f} times smaller. `kvpress tune` finds what loses least."
    )


app.add_typer(calibrate_app, name="calibrate")
app.command("compress")(compress_command)
app.command("ask")(ask_command)
app.command("info")(info_command)
app.command("doctor")(doctor_command)
