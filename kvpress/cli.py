# SPDX-License-Identifier: Apache-2.0
"""The command line: what there is, and what fits. `kvpress eval` and `kvpress demo` are added by `kvpress_eval`.

Modules that need torch are imported by a command when it runs, so that `kvpress --help` need not wait for them.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from kvpress.terminal import Name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpress.calibrate.run import Settings
    from kvpress.plan import Plan

app = typer.Typer(
    name="kvpress",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Compress the key-value cache of language models, and measure what it saves and costs.",
)

PLANNED = (
    "none", "snapkv:0.5", "snapkv:0.75", "snapkv:0.9", "adakv(expected_attention:0.5,epsilon=0.02)", "snapkv:budget=1024",
    "kivi:bits=8", "kivi:bits=4", "kivi:bits=2", "quest:budget=1024", "expected_attention:0.5,epsilon=0.02 + kivi:bits=4",
    "expected_attention:0.5,epsilon=0.02 + kivi:bits=2 + quest:budget=1024", "bounded(keydiff:0.9)", "frontier:smaller=10",
)  # fmt: skip

_WIDE = 100
"""Columns of a terminal from which on a table has lines."""
_TAIL = 0.05
"""The part of a cache from which on a plan says that it is for pairs that fill no tile."""
_PLAIN: dict[str, Any] = {"box": None, "padding": (0, 1, 0, 0)}


@app.callback()
def main(
    modules: Annotated[
        list[str] | None,
        typer.Option("--import", help="A module with presses of your own, here or installed; may be repeated."),
    ] = None,
) -> None:
    """Make presses of the user's own known, before a command asks for them."""
    if modules:
        sys.path.insert(0, "")
    for module in modules or ():
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever the module does
            _fail(ValueError(f"--import {module}: {type(error).__name__}: {error}"))


@app.command("list")
def list_command() -> None:
    """List all presses: role, what they do, paper."""
    from kvpress.core.listing import listed

    table = Table()
    for column in ("press", "role", "what it does", "paper"):
        table.add_column(column, no_wrap=column in ("press", "role"))
    for line in listed():
        table.add_row(*map(Text, (line.name, line.role, line.summary, line.paper or "-")))
    _console().print(table)


@app.command("plan")
def plan_command(
    model: Annotated[str, typer.Option(help="`reference`, a folder, a config.json, or a hub name.")],
    context: Annotated[int, typer.Option(help="Tokens in each sequence.", min=1)] = 131072,
    batch: Annotated[int, typer.Option(help="Sequences at a time.", min=1)] = 1,
    generated: Annotated[int, typer.Option(help="Tokens generated after them.", min=0)] = 0,
    press: Annotated[list[str] | None, typer.Option(help="Press spec; may be repeated. Default: a selection.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="For weights and cache together, such as 24GB: says what fits, and how long.")
    ] = None,
) -> None:
    """Print the memory that a model's cache takes with each method, and while a prompt is read, from its configuration."""
    from kvpress.cache.report import format_bytes, parse_bytes
    from kvpress.core.spec import get_press
    from kvpress.hf.models import load_config, parameters_of_config
    from kvpress.plan import LONGEST, Geometry, longest_context, plan

    room = None
    longest: list[int] = []
    with _shown():
        settings = load_config(model)
        geometry = Geometry.of(settings)
        rows = [(spec, plan(get_press(spec), geometry, context, batch, generated)) for spec in press or PLANNED]
        if memory is not None:
            weights = parameters_of_config(settings) * geometry.dtype.itemsize
            room = parse_bytes(memory, "memory") - weights
            if room <= 0:
                raise ValueError(f"memory {memory} does not hold the weights of the model, {format_bytes(weights)}")
            longest = [longest_context(get_press(spec), geometry, room, batch, generated) for spec, _ in rows]
    length = f"{context} + {generated}" if generated else f"{context}"
    title = f"{model}: {batch} x {length} tokens, {geometry.dtype}".replace("torch.", "")
    console = _console()
    table = Table(title=Text(title, style="table.title"), **({} if console.width >= _WIDE else _PLAIN))
    table.add_column("press")
    for column in ("times\nsmaller", "pairs\nper head", "cache", "peak, read\nat once", "peak, in\nchunks"):
        table.add_column(column, justify="right", no_wrap=True)
    if room is not None:
        table.add_column("longest\ncontext", justify="right", no_wrap=True)
    for place, (spec, planned) in enumerate(rows):
        sizes = map(format_bytes, (planned.total_bytes, planned.peak_bytes, planned.chunked_peak_bytes))
        fits = [f"{most:,}" if most < LONGEST else "any" for most in longest[place : place + 1]]
        table.add_row(Name(spec), f"{planned.factor:.2f}", f"{planned.pairs_per_head:,}", *sizes, *fits)
    console.print(table)
    for spec, planned in rows:
        share = planned.tail_bytes / planned.total_bytes
        if share >= _TAIL:
            said = f"{spec}: {share:.0%} of the cache is for pairs that stay dense as they fill no tile of the codec; "
            said += "a budget of a few pairs more may hold less"
            console.print(Text(said), soft_wrap=True)
    if room is not None:
        left = f"weights {format_bytes(weights)}, which leaves {format_bytes(room)} for the cache and the activations of a pass"
        console.print(Text(f"{memory}: {left}\n{_verdict(rows, longest, room, context)}"), soft_wrap=True)


def _verdict(rows: Sequence[tuple[str, Plan]], longest: Sequence[int], room: int, context: int) -> str:
    """Say which of the presses that were planned is enough, the one that compresses least."""
    from kvpress.cache.report import format_bytes

    fitting = [(planned.factor, spec) for spec, planned in rows if planned.needed_bytes <= room]
    if not fitting:
        most, spec = max(zip(longest, (spec for spec, _ in rows), strict=True))
        return f"None of these fits {context:,} tokens; {spec} fits up to {most:,}."
    factor, spec = min(fitting)
    whole = next((planned for name, planned in rows if name == "none"), None)
    if whole is not None and whole.needed_bytes <= room:
        return f"{context:,} tokens fit without a press."
    needs = (
        "" if whole is None else f" do not fit without a press, which takes {format_bytes(whole.needed_bytes)}; they"
    )
    return (
        f"{context:,} tokens{needs} fit with {spec}, {factor:.1f} times smaller. `kvpress tune` finds what loses least."
    )


@app.command("calibrate")
def calibrate_command(
    model: Annotated[str, typer.Option(help="`reference`, a folder or a hub name.")],
    data: Annotated[
        list[str], typer.Option(help="A .jsonl file with `text`, any text file, or a dataset; may be repeated.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write; double_sparsity also writes the authors' .json.")],
    method: Annotated[
        Literal[
            "aquakv",
            "bits",
            "cq",
            "double_sparsity",
            "duo_attention",
            "expected_attention",
            "fastkvzip",
            "kvquant",
            "kvzap",
            "kvzip_heads",
            "leank",
            "loki",
            "lukv",
            "minference",
            "qfilter",
            "restorekv",
            "rlkv",
            "triattention",
        ],
        typer.Option(
            help="What to fit: bits for every layer, books for coupled quantisation, levels for kvquant, predictors of "
            "values for aquakv, channels for double_sparsity, directions of keys for loki, scales of channels for leank, "
            "statistics of queries for expected_attention_stats, triattention or qfilter, networks for kvzap or fastkvzip, "
            "budgets of heads for lukv, tokens and an adapter for restorekv, patterns for minference, or tables of heads by "
            "duo_attention, rlkv or kvzip_heads (a .tsv)."
        ),
    ] = "cq",
    coupled: Annotated[str | None, typer.Option(help="cq: channels in a code, one number or keys,values (4).")] = None,
    bits: Annotated[str | None, typer.Option(help="cq: bits of a code, one number or keys,values (8).")] = None,
    fisher: Annotated[
        bool | None, typer.Option("--fisher/--no-fisher", help="cq, kvquant: weigh by squared gradients (yes).")
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(help="cq, kvquant, aquakv: most rounds of k-means (100, 50, 50).")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="cq, kvquant, aquakv, networks, tables, restorekv: of what is drawn (0).")
    ] = None,
    outliers: Annotated[
        float | None, typer.Option(help="kvquant: share of the numbers of a channel that its range leaves out (0.01).")
    ] = None,
    average: Annotated[float | None, typer.Option(help="bits: mean over layers, keys and values (3).")] = None,
    density: Annotated[
        float | None, typer.Option(help="minference: part of the pairs of a prompt that is read (0.25).")
    ] = None,
    last: Annotated[int | None, typer.Option(help="minference: newest queries that lines are found by (64).")] = None,
    block: Annotated[int | None, typer.Option(help="minference: tokens of a block (64).")] = None,
    widths: Annotated[str | None, typer.Option(help="bits: what a layer may get (2,3,4,8).")] = None,
    n_sink: Annotated[
        int | None, typer.Option(help="expected_attention: tokens left out at the start of each sequence (4).")
    ] = None,
    sink_size: Annotated[int | None, typer.Option(help="Tables: first tokens that a streaming head keeps.")] = None,
    recent_size: Annotated[int | None, typer.Option(help="Tables: newest tokens that a streaming head keeps.")] = None,
    answer: Annotated[
        int | None,
        typer.Option(help="Tables, restorekv: last tokens of a sequence, which its prompt is to explain (64)."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Trained: updates (tables 200, restorekv 300, kvzap 2000, fastkvzip 5000).")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Tables: of a gate that is open.")] = None,
    lr: Annotated[float | None, typer.Option(help="Tables, networks, restorekv: learning rate.")] = None,
    sample: Annotated[
        int | None, typer.Option(help="kvzap, fastkvzip: tokens drawn from each sequence (500, 2000).")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="kvzap: linear or mlp (mlp).")] = None,
    width: Annotated[
        int | None, typer.Option(help="kvzap: hidden units of an mlp (512); fastkvzip: channels (16).")
    ] = None,
    press: Annotated[
        str | None, typer.Option(help="lukv: the press that scores, without a ratio (expected_attention:epsilon=0.02).")
    ] = None,
    sequences: Annotated[int, typer.Option(help="Sequences to read.", min=1)] = 16,
    tokens: Annotated[int, typer.Option(help="Tokens in each sequence.", min=16)] = 2048,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
) -> None:
    """Fit what a method needs to know about a model; a stopped run goes on where it was when it is started again."""
    from kvpress.cache.report import format_bytes
    from kvpress.calibrate.corpus import documents, pack
    from kvpress.calibrate.run import calibrate
    from kvpress.hf.pipeline import load_model

    console = Console(stderr=True)
    with _shown():
        given = {
            "coupled": None if coupled is None else _sides("coupled", coupled),
            "bits": None if bits is None else _sides("bits", bits),
            "fisher": fisher, "iterations": iterations, "seed": seed, "outliers": outliers,
            "density": density, "last": last, "block": block, "average": average,
            "widths": None if widths is None else _numbers("widths", widths), "n_sink": n_sink,
            "sink_size": sink_size, "recent_size": recent_size, "answer": answer, "steps": steps, "price": price, "lr": lr,
            "sample": sample, "kind": kind, "width": width, "press": press,
        }  # fmt: skip
        settings = _settings(method, {name: value for name, value in given.items() if value is not None})
        loaded, tokenizer = load_model(model)
        ids = pack(tokenizer, (text for source in data for text in documents(source)), tokens, sequences)
        with Progress(console=console) as progress:
            rows: dict[str, TaskID] = {}

            def report(what: str, done: int, total: int) -> None:
                if what not in rows:
                    rows[what] = progress.add_task(what)
                progress.update(rows[what], completed=done, total=total)

            calibrate(loaded.to(device), ids, settings, out, " ".join(data), report)
    typer.echo(f"wrote {out} ({format_bytes(out.stat().st_size)})")


@app.command("compress")
def compress_command(
    model: Annotated[str, typer.Option(help="`reference`, a folder or a hub name.")],
    press: Annotated[str, typer.Option(help="What to do with the text's cache, such as frontier:smaller=10.")],
    text: Annotated[str, typer.Option(help="A text file, or - for standard input.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    zstd: Annotated[bool, typer.Option("--zstd", help="Pack numbers of 16 bits where that pays.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
) -> None:
    """Read a text once and write its compressed cache to a file, which `kvpress ask` answers from."""
    with _shown():
        from kvpress.cache.container import check_compression
        from kvpress.core.spec import get_press
        from kvpress.hf.asking import read_text
        from kvpress.hf.files import save

        compress = "zstd" if zstd else None
        check_compression(compress)
        how = get_press(press)
        if out.is_dir() or not out.absolute().parent.is_dir():
            raise OSError(f"{out} is a folder, or lies in one that does not exist: give the name of a file")
        content = sys.stdin.read() if text == "-" else Path(text).read_text(encoding="utf-8")
        loaded, tokenizer = _loaded(model, dtype, device)
        started = time.perf_counter()
        cache, ids = read_text(loaded, tokenizer, how, content)
        read = time.perf_counter() - started
        info = save(cache, out, loaded, how, tokens=ids, tokenizer=tokenizer, compress=compress)
        typer.echo(info)
        typer.echo(f"read in {read:.2f} s, written in {time.perf_counter() - started - read:.2f} s")


@app.command("ask")
def ask_command(
    questions: Annotated[list[str], typer.Argument(help="One or more; each is answered by itself.")],
    model: Annotated[str, typer.Option(help="`reference`, a folder or a hub name: the model that read the text.")],
    cache: Annotated[Path, typer.Option(help="What `kvpress compress` wrote.")],
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer.", min=1)] = 100,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda, ...")] = "cpu",
) -> None:
    """Answer questions from a compressed cache in a file; the text is not read again."""
    with _shown():
        from kvpress.cache.report import format_bytes
        from kvpress.hf.asking import ask
        from kvpress.hf.files import cache_info, load

        info = cache_info(cache)
        loaded, tokenizer = _loaded(model, info.dtype, device)
        started = time.perf_counter()
        held = load(cache, loaded, tokenizer=tokenizer)
        took = time.perf_counter() - started
        typer.echo(
            f"{info.length} tokens, {format_bytes(info.memory_bytes)} from {format_bytes(info.file_bytes)} in {cache}, "
            f"loaded in {took:.2f} s",
            err=True,
        )
        for question in questions:
            if len(questions) > 1:
                typer.echo(f"{question}")
            reply = ask(
                loaded, tokenizer, held, question, info.get_press(), max_new_tokens=max_new_tokens,
                say=lambda words: typer.echo(words, nl=False),
            )  # fmt: skip
            typer.echo()
            typer.echo(
                f"{reply.tokens} tokens, the first after {reply.first_seconds:.2f} s, all in {reply.seconds:.2f} s",
                err=True,
            )


@app.command("info")
def info_command(
    cache: Annotated[Path, typer.Argument(help="What `kvpress compress` or kvpress.save wrote.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read all of it, and compare the digests.")] = False,
) -> None:
    """Say what a file with a compressed cache holds, and which model and press made it."""
    with _shown():
        from kvpress.cache.container import open_file
        from kvpress.hf.files import cache_info

        typer.echo(cache_info(cache))
        if verify:
            open_file(cache)
            typer.echo("all data are what was written")


@contextmanager
def _shown() -> Iterator[None]:
    """Print what goes wrong with files, models and presses in one line, and keep the libraries' own chatter back."""
    from kvpress.hf.models import quiet

    quiet()
    try:
        yield
    except (
        KeyError, ValueError, TypeError, OSError, ImportError, NotImplementedError, FloatingPointError,
    ) as error:  # fmt: skip
        _fail(error)


def _loaded(model: str, dtype: str, device: str) -> tuple[Any, Any]:
    """Load a model in a type of numbers, and its tokenizer."""
    from kvpress.cache.files import dtype_of
    from kvpress.hf.pipeline import load_model

    loaded, tokenizer = load_model(model, dtype="auto" if dtype == "auto" else dtype_of(dtype))
    return loaded.to(device), tokenizer


def _settings(method: str, given: dict[str, Any]) -> Settings:
    """Make the settings of a method; options of other methods are refused."""
    from kvpress.calibrate import METHODS

    taken = [field.name for field in fields(METHODS[method])]
    for name in given:
        if name not in taken:
            options = ", ".join(_option(own) for own in taken) or "no options of its own"
            raise ValueError(f"{_option(name)} does not belong to {method}, which takes {options}")
    return METHODS[method](**given)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _sides(name: str, text: str) -> tuple[int, int]:
    """Read one number for keys and values, or one for each."""
    what = "a number or two, keys,values"
    numbers = _numbers(name, text, what)
    if len(numbers) > 2:
        raise ValueError(f"{name} must be {what}; got {text!r}")
    return numbers[0], numbers[-1]


def _numbers(name: str, text: str, what: str = "whole numbers with commas between them") -> tuple[int, ...]:
    """Read whole numbers with commas between them."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be {what}; got {text!r}") from None


def _fail(error: Exception) -> NoReturn:
    """Print an error as it is, brackets included, and leave."""
    message = error.args[0] if isinstance(error, KeyError) and error.args else error
    Console(stderr=True, soft_wrap=True).print(Text(f"error: {message}", style="red"))
    raise typer.Exit(2) from error


def _console() -> Console:
    console = Console()
    # A pipe has no width of its own; wide enough that no cell is cut.
    return console if console.is_terminal else Console(width=160)
