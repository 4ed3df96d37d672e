"""The commands `kvpress eval`, `kvpress divergence`, `kvpress reselect`, `kvpress lm-eval` and `kvpress demo`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from transformers.utils import logging as transformers_logging

from kvpress_eval.config import RunConfig
from kvpress_eval.demo import demo_config
from kvpress_eval.divergence import measure, to_table
from kvpress_eval.errors import ConfigError, EvalError, translated_os_errors
from kvpress_eval.frontier import write_frontier_png
from kvpress_eval.lm_eval import require_lm_eval
from kvpress_eval.report import write_report
from kvpress_eval.reselect import best, candidates
from kvpress_eval.runner import INTERRUPTED, RunResult, run
from kvpress_eval.store import replace_file, write_json
from kvpress_eval.summary import summarise
from kvpress_eval.table import print_table, to_csv, to_markdown
from kvpress_eval.yaml_config import load_config

_PLAIN_WIDTH = 120
"""Columns of tables that go to a file or a pipe."""


def eval_command(
    model: Annotated[str | None, typer.Option(help="`reference`, a local folder or a hub name.")] = None,
    press: Annotated[list[str] | None, typer.Option(help="A press such as snapkv:0.5; may be repeated.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Names separated by commas, or file:PATH.jsonl.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Context lengths in tokens, separated by commas.")] = None,
    depths: Annotated[str | None, typer.Option(help="A grid of depths such as 0,0.5,1, for a heat map.")] = None,
    filler: Annotated[str | None, typer.Option(help="What surrounds the answer: noise, repeat or file:PATH.")] = None,
    samples: Annotated[int | None, typer.Option(help="Samples per task and length.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the files of published benchmarks.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results; a killed run continues there.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the generated contexts.")] = None,
    language: Annotated[str | None, typer.Option(help="Wording of the tasks: auto, reference or english.")] = None,
    question_aware: Annotated[
        bool | None, typer.Option("--question-aware/--question-unaware", help="Compress after the question.")
    ] = None,
    depth: Annotated[float | None, typer.Option(help="Where the answer is hidden, 0 to 1; default anywhere.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Contexts that are read together.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, bfloat16, float16 or float32.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:1.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    max_seconds_per_sample: Annotated[float | None, typer.Option(help="Give up on an answer after this.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with the same fields; options override it.")] = None,
) -> None:
    """Measure accuracy, memory and time of presses on long-context tasks."""
    options: dict[str, Any] = {
        "model": model,
        "presses": tuple(press) if press else None,
        "tasks": _split(tasks),
        "lengths": _split(lengths),
        "depths": _split(depths),
        "filler": filler,
        "samples": samples,
        "data_dir": data_dir,
        "out": out,
        "seed": seed,
        "language": language,
        "question_aware": question_aware,
        "depth": depth,
        "batch_size": batch_size,
        "dtype": dtype,
        "device": device,
        "threads": threads,
        "max_new_tokens": max_new_tokens,
        "max_seconds_per_sample": max_seconds_per_sample,
    }
    with _exit_codes() as console:
        chosen = load_config(config, {key: value for key, value in options.items() if value is not None})
        _measure(chosen, console)


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
    with _exit_codes() as console:
        record = _diverge(options, tokens, text, out, console)
        if out:
            write_json(out, record)


def reselect_command(
    model: Annotated[str, typer.Option(help="`reference`, a local folder or a hub name.")] = "reference",
    budget: Annotated[
        str, typer.Option(help="Pairs that are read, or a fraction of them; small ones tell more.")
    ] = "64",
    skip_layers: Annotated[int, typer.Option(help="The layer that chooses first.", min=0)] = 2,
    heads: Annotated[str, typer.Option(help="mean, max or query.")] = "mean",
    context: Annotated[int, typer.Option(help="Tokens that are read in one pass.", min=16)] = 1024,
    tokens: Annotated[int, typer.Option(help="Tokens that follow, one at a time.", min=1)] = 128,
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
    with _exit_codes() as console:
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
        record = _diverge(options, tokens, text, out, console)
        chosen = best(record["rows"])
        console.print(Text(f"best: {chosen}"))
        if out:
            write_json(out, {**record, "best": chosen})


def _diverge(
    options: dict[str, Any], tokens: int, text: Path | None, out: Path | None, console: Console
) -> dict[str, Any]:
    """Measure divergence and print it; the folder of `out` is made before any work."""
    config = load_config(None, options)
    if out:
        with translated_os_errors(out.parent):
            out.parent.mkdir(parents=True, exist_ok=True)
    record = measure(config, tokens, text, console)
    console.print(to_table(record["rows"]))
    return record


def _number(text: str) -> float:
    """Read a whole number or a fraction."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise ConfigError(f"budget must be a whole number of pairs, or a fraction in (0, 1), got {text!r}") from None


def lm_eval_command(
    tasks: Annotated[str, typer.Option(help="Tasks, groups or tags of lm-eval, separated by commas.")],
    model: Annotated[str, typer.Option(help="`reference`, a local folder or a hub name.")] = "reference",
    press: Annotated[list[str] | None, typer.Option(help="A press such as snapkv:0.5; may be repeated.")] = None,
    include: Annotated[Path | None, typer.Option(help="Folder with task files of your own.")] = None,
    limit: Annotated[int | None, typer.Option(help="Samples per task; default all.", min=1)] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples in the prompt; default the task's.", min=0)] = None,
    chat_template: Annotated[bool, typer.Option("--chat-template", help="Use the tokenizer's chat template.")] = False,
    metadata: Annotated[str, typer.Option(help='JSON for tasks that take it: {"max_seq_lengths": [4096]}')] = "{}",
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts that are read together.")] = 1,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
) -> None:
    """Score presses on tasks of lm-eval (lm-evaluation-harness).

    Every prompt is compressed as a whole. lm-eval's own command line, with the model `kvpress`, is
    `python -m kvpress_eval.lm_eval`.
    """
    with _exit_codes() as console:
        require_lm_eval()
        from kvpress_eval.lm_tasks import Selection, compare
        from kvpress_eval.lm_tasks import to_table as scores_table

        options: dict[str, Any] = {
            "model": model,
            "presses": tuple(press or ("none",)),
            "lengths": (16,),  # lm-eval itself cuts prompts to what the model takes
            "batch_size": batch_size,
            "dtype": dtype,
            "device": device,
            "threads": threads,
        }
        names = tuple(_split(tasks) or ())
        selection = Selection(names, include, limit, num_fewshot, chat_template, _json_object(metadata))
        config = load_config(None, options)
        if out:
            with translated_os_errors(out.parent):
                out.parent.mkdir(parents=True, exist_ok=True)
        record = compare(config, selection, console)
        console.print(scores_table(record))
        if out:
            write_json(out, record)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"metadata must be JSON, got {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"metadata must be a JSON object, got {text!r}")
    return value


def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/demo"),
) -> None:
    """Show on a small real model what eviction, quantisation and selection cost and save."""
    with _exit_codes() as console:
        _measure(demo_config(out), console)


def write_outputs(result: RunResult, config: RunConfig) -> list[Path]:
    """Write the report, the plots and the tables of a run; return where they are."""
    summaries = summarise(result.cells)
    names = ("report.html", "frontier.png", "table.md", "table.csv")
    report, png, markdown, table = paths = [config.out / name for name in names]
    write_report(result, report)
    with translated_os_errors(png):
        write_frontier_png(summaries, png)
    replace_file(markdown, to_markdown(summaries).encode())
    replace_file(table, to_csv(summaries).encode())
    return paths


def _measure(config: RunConfig, console: Console) -> None:
    result = run(config, console)
    if result.interrupted:
        console.print("interrupted; the same command continues where this run stopped")
    else:
        print_table(summarise(result.cells), console)
        for path in write_outputs(result, config):
            console.print(Text(f"wrote {path}"), soft_wrap=True)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _split(text: str | None) -> Sequence[str] | None:
    return tuple(part.strip() for part in text.split(",") if part.strip()) if text is not None else None


@contextmanager
def _exit_codes() -> Iterator[Console]:
    """Turn errors into a message and an exit code, and keep the libraries' own chatter off the terminal."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    terminal = Console()
    try:
        yield terminal if terminal.is_terminal else Console(width=_PLAIN_WIDTH)
    except EvalError as error:
        message = Text(f"error: {error}", style="red")
        Console(stderr=True, soft_wrap=True).print(message)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
