"""`kvpress eval` and `kvpress demo`: accuracy, memory and time on long-context tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from kvpress_eval.commands.terminal import exit_codes, split
from kvpress_eval.config import RunConfig
from kvpress_eval.demo import demo_config
from kvpress_eval.errors import translated_os_errors
from kvpress_eval.frontier import write_frontier_png
from kvpress_eval.report import write_report
from kvpress_eval.runner import RunResult, run
from kvpress_eval.store import replace_file
from kvpress_eval.summary import summarise
from kvpress_eval.table import print_table, to_csv, to_markdown
from kvpress_eval.yaml_config import load_config


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
        "tasks": split(tasks),
        "lengths": split(lengths),
        "depths": split(depths),
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
    with exit_codes() as console:
        chosen = load_config(config, {key: value for key, value in options.items() if value is not None})
        measure_and_write(chosen, console)


def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/demo"),
) -> None:
    """Show on a small real model what eviction, quantisation and selection cost and save."""
    with exit_codes() as console:
        measure_and_write(demo_config(out), console)


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


def measure_and_write(config: RunConfig, console: Console) -> None:
    """Run a configuration, print its table and write its files."""
    result = run(config, console)
    if result.interrupted:
        console.print("interrupted; the same command continues where this run stopped")
    else:
        print_table(summarise(result.cells), console)
        for path in write_outputs(result, config):
            console.print(Text(f"wrote {path}"), soft_wrap=True)
    if result.exit_code:
        raise typer.Exit(result.exit_code)
