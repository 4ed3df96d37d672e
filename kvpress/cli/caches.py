# SPDX-License-Identifier: Apache-2.0
"""`kvpress compress`, `ask` and `info`: compressed caches in files."""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpress.cli.console import UNWRITABLE, Device, ModelKwargs, fail, shown, tokens
from kvpress.cli.outputs import check_outputs

DTYPES = ("auto", "bfloat16", "float16", "float32")


def compress_command(
    model: Annotated[str, typer.Option(help="`reference`, a folder or a hub name.")],
    press: Annotated[str, typer.Option(help="Press spec, such as frontier:smaller=10.")],
    text: Annotated[str, typer.Option(help="A text file, or - for standard input.")],
    out: Annotated[Path, typer.Option(help="The file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    zstd: Annotated[
        bool, typer.Option("--zstd", help="Compress 16-bit tensors with zstd if that saves space.")
    ] = False,
    refine: Annotated[
        float | None,
        typer.Option(metavar="MINUTES", help="Train the cache for so many minutes to answer as with the text."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    device: Device = "auto",
    model_kwargs: ModelKwargs = None,
) -> None:
    """Read a text once and write its compressed cache to a file for `kvpress ask`.

    With `--refine`, the pairs of the cache are then trained, at the same size: the model asks itself questions about the text,
    and learns to answer from the cache as from the whole text. A killed training continues with the same command.
    """
    with shown(output=out):
        from kvpress.cache.container import check_compression
        from kvpress.cache.report import memory_report
        from kvpress.calibrate.corpus import read_utf8
        from kvpress.core.effect import assumed_sizes, check_acts, left_whole, left_whole_note
        from kvpress.core.spec import get_press
        from kvpress.hf.cache.files import save
        from kvpress.hf.generation.ask import read_text
        from kvpress.hf.refine.refine import check_minutes, refine_text

        compress = "zstd" if zstd else None
        check_compression(compress)
        if dtype not in DTYPES:
            raise ValueError(f"--dtype must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, got {dtype!r}")
        if refine is not None:
            check_minutes(refine)
        configured = get_press(press)
        check_acts(configured)
        for note in assumed_sizes(configured):
            typer.echo(note, err=True)
        if out.is_dir() or not out.absolute().parent.is_dir():
            fail(
                OSError(f"{out} is a folder, or its parent folder does not exist: pass the name of a file"), UNWRITABLE
            )
        check_outputs([out], [model, *([] if text == "-" else [text])], force)
        content = sys.stdin.read() if text == "-" else read_utf8(Path(text))
        loaded, tokenizer = _loaded(model, dtype, device, model_kwargs)
        started, notes, state = time.perf_counter(), None, out.with_name(f"{out.name}.refine")
        if refine is None:
            cache, ids = read_text(loaded, tokenizer, configured, content)
        else:
            print_line = partial(typer.echo, err=True)
            refined = refine_text(loaded, tokenizer, configured, content, refine, state, report=print_line)
            cache, ids, notes = refined.cache, refined.ids, refined.notes
            typer.echo(refined)
        read_seconds = time.perf_counter() - started
        report = memory_report(cache)
        if left_whole(configured, report.kept / max(report.seen, 1), report.total_bytes, report.uncompressed_bytes):
            typer.echo(f"warning: {left_whole_note(configured)}", err=True)
        info = save(cache, out, loaded, configured, tokens=ids, tokenizer=tokenizer, notes=notes, compress=compress)
        if refine is not None:
            state.unlink(missing_ok=True)
        typer.echo(info)
        verb = "read" if refine is None else "read and refined"
        write_seconds = time.perf_counter() - started - read_seconds
        typer.echo(f"{verb} in {read_seconds:.2f} s, written in {write_seconds:.2f} s")


def ask_command(
    questions: Annotated[list[str], typer.Argument(help="One or more questions; each is answered independently.")],
    model: Annotated[str, typer.Option(help="`reference`, a folder or a hub name: the model that read the text.")],
    cache: Annotated[Path, typer.Option(help="File from `kvpress compress`.")],
    max_new_tokens: Annotated[int, tokens("max_new_tokens", "Longest answer.")] = 100,
    device: Device = "auto",
    model_kwargs: ModelKwargs = None,
) -> None:
    """Answer questions from a compressed cache in a file; the text is not read again."""
    with shown():
        from kvpress.cache.report import format_bytes
        from kvpress.hf.cache.files import load
        from kvpress.hf.cache.info import cache_info
        from kvpress.hf.generation.ask import ask

        info = cache_info(cache)
        loaded, tokenizer = _loaded(model, info.dtype, device, model_kwargs)
        started = time.perf_counter()
        loaded_cache = load(cache, loaded, tokenizer=tokenizer)
        load_seconds = time.perf_counter() - started
        typer.echo(
            f"{info.length} tokens, {format_bytes(info.memory_bytes)} from {format_bytes(info.file_bytes)} in {cache}, "
            f"loaded in {load_seconds:.2f} s",
            err=True,
        )
        for question in questions:
            if len(questions) > 1:
                typer.echo(f"{question}")
            reply = ask(
                loaded, tokenizer, loaded_cache, question, info.get_press(), max_new_tokens=max_new_tokens,
                write=lambda words: typer.echo(words, nl=False),
            )  # fmt: skip
            typer.echo()
            typer.echo(
                f"{reply.tokens} tokens, the first after {reply.first_seconds:.2f} s, all in {reply.seconds:.2f} s",
                err=True,
            )


def info_command(
    cache: Annotated[Path, typer.Argument(help="File from `kvpress compress` or kvpress.save.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read the whole file and check its digests.")] = False,
) -> None:
    """Print contents, model and press of a file with a compressed cache."""
    with shown(models=False):
        from kvpress.hf.cache.info import cache_info

        typer.echo(cache_info(cache))
        if verify:
            from kvpress.cache.container import open_file

            open_file(cache)
            typer.echo("all digests match")


def _loaded(model: str, dtype: str, device: str, model_kwargs: str | None) -> tuple[Any, Any]:
    """Load a model in a dtype and with further arguments, and its tokenizer."""
    from kvpress.cache.files import dtype_of
    from kvpress.hf.generation.pipeline import load_model
    from kvpress.hf.model_kwargs import configured, parse_model_kwargs
    from kvpress.hf.models import device_named

    place = device_named(device)
    further = configured(model, parse_model_kwargs(model_kwargs))
    loaded, tokenizer = load_model(model, dtype="auto" if dtype == "auto" else dtype_of(dtype), **further)
    return loaded.to(place), tokenizer
