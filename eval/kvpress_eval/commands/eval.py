# SPDX-License-Identifier: Apache-2.0
"""`kvpress eval`: accuracy, memory and time on long-context tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperOption

from kvpress_eval.commands import _shared as shared
from kvpress_eval.common.errors import ConfigError

if TYPE_CHECKING:
    from kvpress_eval.config.schema import RunConfig

_LISTS = ("tasks", "lengths", "depths", "ratios")
_NAMED = {"model": "models"}
"""Options whose name is not that of their field of a run."""
_OWN = ("config", "lm_eval", "lm_eval_include", "dry_run")
"""Options that are no part of a grid of runs."""

_TASKS_ONLY = (
    "seed", "filler", "language", "question_aware", "depth", "depths", "data_dir", "max_context_length", "prefix_store",
    "max_new_tokens", "max_seconds_per_sample",
)  # fmt: skip
"""Fields of a run that tasks of lm-eval do not read."""

EVALUATE = {
    "dataset": "--tasks, such as --tasks longbench:hotpotqa",
    "data_dir": "--lengths for RULER, or --data-dir for the folder of a published benchmark",
    "press_name": "--press, such as --press snapkv:0.5",
    "compression_ratio": "in the press, --press snapkv:0.5, or --ratios for all presses",
    "key_channel_compression_ratio": "in the press, --press 'snapkv:0.5 + think:0.5'",
    "head_compression_ratio": "in the press, --press duo_attention:0.5",
    "threshold": "in the press, --press 'dms(kvzap):threshold=-4'",
    "fraction": "--samples, for each task and length",
    "max_new_tokens": "--max-new-tokens",
    "max_context_length": "--max-context-length",
    "query_aware": "--question-aware",
    "compress_questions": "--question-aware",
    "needle_depth": "--depth from 0 to 1, or --depths for a heat map",
    "compression_interval": "in the press, --press 'decoding(knorm):compression_interval=512'",
    "target_size": "in the press, --press 'decoding(knorm):target_size=2048'",
    "hidden_states_buffer_size": "in the press, --press 'decoding(knorm):hidden_states_buffer_size=256'",
    "output_dir": "--out",
    "log_level": "none",
    "model_kwargs": "--model-kwargs",
    "fp8": "none; quantise the weights, and pass that model",
    "config_file": "--config",
}
"""Options of NVIDIA's `evaluate.py` that have another name here."""


class Command(TyperCommand):
    """`eval` with the defaults of `RunConfig` and the names of all tasks in its help.

    They are imported only for the help, because the import takes half a second.
    """

    def with_defaults(self) -> Command:
        """Set the default of every option from `RunConfig`, and list all tasks at the end."""
        from kvpress_eval.config.schema import RunConfig

        fields = {_NAMED.get(name, name): field for name, field in RunConfig.model_fields.items()}
        for option in self.params:
            default = fields[option.name].default if option.name in fields else None
            if isinstance(option, TyperOption) and default not in (None, (), {}):
                option.show_default = as_given(default)
        self.epilog = f"Tasks: {task_names()}"
        return self

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self.with_defaults()
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; an option of NVIDIA's `evaluate.py` is refused with its name here."""
        for argument in args:
            option = argument.partition("=")[0]
            if option.startswith("--") and (renamed := EVALUATE.get(option[2:])):
                raise typer.BadParameter(f"{option} is an option of NVIDIA's evaluate.py; here: {renamed}")
        return super().parse_args(ctx, args)


def as_given(default: object) -> str:
    """Return the default of a field as its option would be given; that of a switch names the switch."""
    if isinstance(default, bool):
        return "yes" if default else "no"
    return ",".join(map(str, default)) if isinstance(default, (tuple, list)) else str(default)


def task_names() -> str:
    """Return the names that --tasks takes; of benchmarks with subsets, each once with its subsets."""
    from kvpress_eval.tasks.catalogue import KINDS

    groups: dict[str, list[str]] = {}
    for name in (name for kind in KINDS for name in kind.names if name.count(":") < 2):
        group, _, subset = name.rpartition(":")
        groups.setdefault(group, []).append(subset)
    alone = ", ".join(groups.pop("", []))
    subsets = [f"{group}:NAME with NAME one of {', '.join(names)}" for group, names in groups.items()]
    return "\n\n".join([alone, *subsets, *(f"{kind.prefix}PATH" for kind in KINDS if kind.prefix)])


def describe_empty_run(config: RunConfig) -> str:
    """Return the message for a run without presses and tasks: its size with the defaults, and the options to set."""
    contexts = len(config.tasks) * len(config.lengths) * config.samples
    lengths = " and ".join(map(str, config.lengths))
    return (
        f"nothing to measure is named. This would read {contexts} contexts, {config.samples} for each of "
        f"{len(config.tasks)} tasks at {lengths} tokens, with the model {config.model!r} and no press at all, "
        f"into {config.out}.\n"
        "Name presses (`kvpress list`) or tasks (`kvpress eval --help`), for example\n"
        "  kvpress eval --press none --press snapkv:0.5 --tasks niah_single,vt --lengths 512 --samples 20\n"
        "and add --dry-run to see first what that takes. --press none starts the run above; `kvpress demo` compares "
        "all kinds of presses."
    )


def command(
    models: Annotated[
        list[str] | None,
        typer.Option("--model", help="`reference`, `smollm2`, a .gguf file, a folder or a hub name; may be repeated."),
    ] = None,
    presses: Annotated[
        list[str] | None, typer.Option("--press", help="A press such as snapkv:0.5; may be repeated.")
    ] = None,
    ratios: Annotated[
        str | None, typer.Option(help="Ratios, separated by commas, for presses that are only named or have {ratio}.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Names separated by commas, or file:PATH.jsonl.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Context lengths in tokens, separated by commas.")] = None,
    depths: Annotated[str | None, typer.Option(help="A grid of depths such as 0,0.5,1, for a heat map.")] = None,
    filler: Annotated[
        str | None,
        typer.Option(help="Text around the answer: noise, repeat, essays, stdlib, bfcl, human_eval or a file."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Samples per task and length.")] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with the files of published benchmarks.")] = None,
    max_context_length: shared.MaxContextLength = None,
    prefix_store: Annotated[
        Path | None, typer.Option(help="Folder of compressed contexts, which no run that names it reads twice.")
    ] = None,
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
    model_kwargs: shared.ModelKwargs = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
    max_new_tokens: Annotated[int | None, shared.token_count("max_new_tokens", "Longest answer.")] = None,
    max_seconds_per_sample: Annotated[float | None, typer.Option(help="Give up on an answer after this.")] = None,
    engine: Annotated[str | None, typer.Option(help="local, or ray: cells run on all machines of a cluster.")] = None,
    ray_address: shared.RayAddress = None,
    tp: Annotated[
        int | None, typer.Option(help="Processes that share a model (tensor parallel), with --engine ray.")
    ] = None,
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
    options = {name: value for name, value in locals().items() if value is not None and name not in _OWN}
    with shared.exit_codes() as console:
        from kvpress_eval.config.grid import load_grid
        from kvpress_eval.report.write import check_folder
        from kvpress_eval.run.estimate import estimate
        from kvpress_eval.run.runner import prepare

        values = {name: shared.split(value) if name in _LISTS else value for name, value in options.items()}
        runs = load_grid(config, values)
        if not (dry_run or config or lm_eval or presses or tasks):
            raise ConfigError(describe_empty_run(runs[0]))
        shared.print_sizes(runs[0].presses)
        if dry_run:
            for estimated in [estimate(run) for run in runs]:
                estimated.show(console)
            return
        if lm_eval is not None and any(run.engine != "local" for run in runs):
            raise ConfigError("lm-eval runs in this process only: give --lm-eval and --engine ray to two commands")
        if lm_eval is not None:
            _check_read_by_lm_eval(runs[0])
        check_folder(runs[0].out)
        # A run checks its own settings before the model loads; later steps are checked here.
        for run in runs[1:] if lm_eval is None else runs:
            prepare(run)
        if lm_eval is not None:
            for run in runs:
                _run_lm_eval(run, shared.split(lm_eval), lm_eval_include, console)
        if lm_eval is None or any("tasks" in run.model_fields_set for run in runs):
            measure_and_write(runs, console)


def _check_read_by_lm_eval(config: RunConfig) -> None:
    """Raise ConfigError for settings that neither lm-eval nor a task of the run reads."""
    ignored = [name for name in _TASKS_ONLY if name in config.model_fields_set]
    if ignored and "tasks" not in config.model_fields_set:
        raise ConfigError(
            f"tasks of lm-eval do not read {', '.join(ignored)}: leave that out, or add --tasks that it applies to"
        )


def _run_lm_eval(config: RunConfig, tasks: Sequence[str], include: Path | None, console: Console) -> None:
    """Score the presses of a run on tasks of lm-eval, with its samples and lengths if they are configured."""
    from kvpress_eval.common.files import hash_json, write_json
    from kvpress_eval.lm.require import require_lm_eval
    from kvpress_eval.report.comparison_tables import lm_table

    require_lm_eval()
    from kvpress_eval.lm.tasks import Selection, compare

    chosen = config.model_fields_set
    limit = config.samples if "samples" in chosen else None
    metadata = {"max_seq_lengths": list(config.lengths)} if "lengths" in chosen else {}
    record = compare(config, Selection(tuple(tasks), include, limit, metadata=metadata), console)
    console.print(lm_table(record))
    # A further command with other tasks or presses adds its record to the folder.
    path = config.out / f"lm-eval-{hash_json([record['config'], record['weights'], record['dtype']])[:8]}.json"
    write_json(path, record)
    console.print(Text(f"wrote {path}"), soft_wrap=True)


def measure_and_write(runs: Sequence[RunConfig], console: Console) -> None:
    """Run configurations with a shared output folder, print a table per model, and write the report files."""
    from kvpress.signals import INTERRUPTED
    from kvpress_eval.report.table import print_table
    from kvpress_eval.report.write import write_outputs
    from kvpress_eval.results.summary import conclusion, summarise
    from kvpress_eval.run.runner import run

    results = []
    for config in runs:
        results.append(run(config, console))
        if results[-1].interrupted:
            console.print("interrupted; the same command continues where this run stopped")
            raise typer.Exit(INTERRUPTED)
    for config, result in zip(runs, results, strict=True):
        if len(runs) > 1:
            console.print(Text(f"\n{config.model}", style="bold"))
        summaries = summarise(result.cells)
        print_table(summaries, console)
        if sentence := conclusion(summaries):
            console.print(Text(sentence, style="bold"))
        for label in result.busy:
            console.print(Text(f"{label}: left to another process, which is running it", style="red"))
    page = runs[0].out / "report.html"
    shared.print_written(page, write_outputs([runs[0].out], page), console)
    if any(result.exit_code for result in results):
        raise typer.Exit(next(result.exit_code for result in results if result.exit_code))
