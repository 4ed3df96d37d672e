"""`kvpress eval` and `kvpress demo`: accuracy, memory and time on long-context tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from kvpress_eval.cells import hash_json
from kvpress_eval.commands.terminal import exit_codes, split
from kvpress_eval.config import RunConfig
from kvpress_eval.demo import demo_config
from kvpress_eval.estimate import estimate
from kvpress_eval.grid import load_grid
from kvpress_eval.lm_eval import require_lm_eval
from kvpress_eval.lm_scores import to_table
from kvpress_eval.report import write_outputs
from kvpress_eval.runner import INTERRUPTED, prepare, run
from kvpress_eval.store import write_json
from kvpress_eval.summary import summarise
from kvpress_eval.table import print_table


def eval_command(
    model: Annotated[
        list[str] | None, typer.Option(help="`reference`, a local folder or a hub name; may be repeated.")
    ] = None,
    press: Annotated[list[str] | None, typer.Option(help="A press such as snapkv:0.5; may be repeated.")] = None,
    ratios: Annotated[
        str | None, typer.Option(help="Ratios, separated by commas, for presses that are only named or have {ratio}.")
    ] = None,
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
    device_map: Annotated[
        str | None, typer.Option(help="Spread the layers over all devices: auto, balanced or sequential.")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    max_seconds_per_sample: Annotated[float | None, typer.Option(help="Give up on an answer after this.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with the same fields; options override it.")] = None,
    lm_eval: Annotated[
        str | None, typer.Option(help="Also, or without --tasks only, tasks of lm-eval such as ruler,gsm8k.")
    ] = None,
    lm_eval_include: Annotated[Path | None, typer.Option(help="Folder with lm-eval tasks of your own.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and estimate time and memory; run nothing.")
    ] = False,
) -> None:
    """Measure accuracy, memory and time of presses on long-context tasks."""
    options: dict[str, Any] = {
        "models": model,
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
        "device_map": device_map,
        "ratios": split(ratios),
        "threads": threads,
        "max_new_tokens": max_new_tokens,
        "max_seconds_per_sample": max_seconds_per_sample,
    }
    with exit_codes() as console:
        given = {key: value for key, value in options.items() if value is not None}
        runs = load_grid(config, given)
        if dry_run:
            for estimated in [estimate(run_config) for run_config in runs]:
                estimated.show(console)
            return
        # A run checks itself before its model loads; what comes after other work is checked now.
        for run_config in runs[1:] if lm_eval is None else runs:
            prepare(run_config)
        only_lm_eval = lm_eval is not None and not any("tasks" in run_config.model_fields_set for run_config in runs)
        if lm_eval is not None:
            for run_config in runs:
                _run_lm_eval(run_config, split(lm_eval) or (), lm_eval_include, console)
        if not only_lm_eval:
            measure_and_write(runs, console)


def _run_lm_eval(config: RunConfig, tasks: Sequence[str], include: Path | None, console: Console) -> None:
    """Score the presses of a run on tasks of lm-eval, with as many samples and of such lengths as were asked for."""
    require_lm_eval()
    from kvpress_eval.lm_tasks import Selection, compare

    chosen = config.model_fields_set
    limit = config.samples if "samples" in chosen else None
    metadata = {"max_seq_lengths": list(config.lengths)} if "lengths" in chosen else {}
    record = compare(config, Selection(tuple(tasks), include, limit, metadata=metadata), console)
    console.print(to_table(record))
    path = config.out / f"lm-eval-{hash_json(config.model)[:8]}.json"
    write_json(path, record)
    console.print(Text(f"wrote {path}"), soft_wrap=True)


def demo_command(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("runs/demo"),
) -> None:
    """Show on a small real model what eviction, quantisation and selection cost and save."""
    with exit_codes() as console:
        measure_and_write([demo_config(out)], console)


def measure_and_write(runs: Sequence[RunConfig], console: Console) -> None:
    """Run configurations that share an output folder, print a table for each model, and write the files of the folder."""
    results = []
    for config in runs:
        results.append(run(config, console))
        if results[-1].interrupted:
            console.print("interrupted; the same command continues where this run stopped")
            raise typer.Exit(INTERRUPTED)
    for config, result in zip(runs, results, strict=True):
        if len(runs) > 1:
            console.print(Text(f"\n{config.model}", style="bold"))
        print_table(summarise(result.cells), console)
        for label in result.busy:
            console.print(Text(f"{label}: left to another process, which is running it", style="red"))
    for path in write_outputs([runs[0].out], runs[0].out / "report.html"):
        console.print(Text(f"wrote {path}"), soft_wrap=True)
    if any(result.exit_code for result in results):
        raise typer.Exit(next(result.exit_code for result in results if result.exit_code))
