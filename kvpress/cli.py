"""The command line: what there is, and what fits. `kvpress eval` and `kvpress demo` are added by `kvpress_eval`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvpress.cache.report import format_bytes
from kvpress.spec import get_press, list_presses

app = typer.Typer(
    name="kvpress",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Compress the key-value cache of language models, and measure what it saves and costs.",
)

PLANNED = (
    "none", "snapkv:0.5", "snapkv:0.75", "snapkv:0.9", "adakv(expected_attention:0.5)", "snapkv:budget=1024", "kivi:bits=8",
    "kivi:bits=4", "kivi:bits=2", "quest:budget=1024", "expected_attention:0.5 + kivi:bits=4",
    "expected_attention:0.5 + kivi:bits=2 + quest:budget=1024",
)  # fmt: skip


@app.command("list")
def list_command() -> None:
    """List all presses: role, what they do, paper."""
    table = Table()
    for column in ("press", "role", "what it does", "paper"):
        table.add_column(column, no_wrap=column in ("press", "role"))
    for entry in list_presses():
        table.add_row(entry.name, entry.role, entry.summary, entry.paper or "-")
    _console().print(table)


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Option(help="`reference`, a folder, a config.json, or a hub name.")],
    context: Annotated[int, typer.Option(help="Tokens in each sequence.", min=1)] = 131072,
    batch: Annotated[int, typer.Option(help="Sequences at a time.", min=1)] = 1,
    press: Annotated[list[str] | None, typer.Option(help="Press spec; may be repeated. Default: a selection.")] = None,
) -> None:
    """Print the memory that each method takes for a model's cache, from its configuration alone."""
    from kvpress.hf import load_config
    from kvpress.plan import Geometry, plan

    try:
        geometry = Geometry.of(load_config(model))
        rows = [(spec, plan(get_press(spec), geometry, context, batch)) for spec in press or PLANNED]
    except (KeyError, ValueError, TypeError, OSError, NotImplementedError) as error:
        Console(stderr=True).print(f"[red]error:[/] {error}", markup=True, highlight=False)
        raise typer.Exit(2) from error
    table = Table(title=f"{model}: {batch} x {context} tokens, {geometry.dtype}".replace("torch.", ""))
    table.add_column("press")
    for column in ("cache", "times smaller", "pairs per head"):
        table.add_column(column, justify="right")
    for spec, planned in rows:
        table.add_row(spec, format_bytes(planned.total_bytes), f"{planned.factor:.2f}", f"{planned.pairs_per_head:,}")
    _console().print(table)


def _console() -> Console:
    console = Console()
    # A pipe has no width of its own; wide enough that no cell is cut.
    return console if console.is_terminal else Console(width=160)
