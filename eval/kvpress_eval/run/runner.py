# SPDX-License-Identifier: Apache-2.0
"""Run the cells of a configuration without losing a finished sample.

All presses of a task and length are run together, so that a context is read once for all of them. Each cell is claimed
separately: several processes can share an output folder, and each cell is run by one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console

import kvpress
from kvpress.signals import INTERRUPTED
from kvpress_eval.common.errors import BusyError, ConfigError
from kvpress_eval.common.files import make_folder
from kvpress_eval.config.schema import RAY, REFERENCE, RunConfig
from kvpress_eval.results.cells import CellResult, read_result
from kvpress_eval.results.store import log_run, store_of
from kvpress_eval.run.cells import Cell, make_cells
from kvpress_eval.run.dispatch import run_on_cluster
from kvpress_eval.run.environment import describe_run
from kvpress_eval.run.interrupt import Interrupt
from kvpress_eval.run.job import Job
from kvpress_eval.run.language import in_words_of
from kvpress_eval.run.models import (
    Engine,
    check_lengths,
    check_ranks,
    load_engine,
    load_tokenizer,
    read_settings,
    use_threads,
)
from kvpress_eval.run.progress import RunProgress
from kvpress_eval.run.savings import Savings
from kvpress_eval.tasks.catalogue import expand_tasks
from kvpress_eval.tasks.source import Source

FAILED = 1


@dataclass(frozen=True)
class RunResult:
    """Results of a run."""

    cells: Sequence[CellResult]
    record: dict[str, Any]
    """Record of this invocation."""
    interrupted: bool
    savings: Savings
    busy: Sequence[str] = field(default_factory=tuple)
    """Labels of the cells that other processes had claimed."""

    @property
    def exit_code(self) -> int:
        """Exit code of the command; 0 if every cell is complete."""
        if self.interrupted:
            return INTERRUPTED
        if all(cell.complete for cell in self.cells):
            return 0
        return BusyError.exit_code if self.busy else FAILED


def prepare(config: RunConfig, engine: Engine | None = None) -> tuple[RunConfig, list[Source], Any]:
    """Run all checks that do not need the weights.

    Returns the configuration with its language, the tasks with their data, and the model's configuration.
    """
    settings = engine.model.config if engine else None
    if config.language == "auto" and config.model != REFERENCE:
        expand_tasks(config)  # a missing file raises before the tokenizer is loaded
        settings = settings or read_settings(config)
        config = in_words_of(config, engine.tokenizer if engine else load_tokenizer(config, settings))
    sources = expand_tasks(config)
    settings = settings or read_settings(config)
    check_lengths(config, settings)
    check_ranks(config, settings)
    make_folder(config.out)
    if config.prefix_store is not None:
        make_folder(config.prefix_store)
    return config, sources, settings


def run(config: RunConfig, console: Console, engine: Engine | None = None) -> RunResult:
    """Run the missing samples of a configuration; return all results. `engine` is an already loaded model."""
    if engine is not None and config.engine == RAY:
        raise ConfigError(
            "engine ray loads the model on each machine: give its name, not a model that is loaded already"
        )
    config, sources, settings = prepare(config, engine)
    if config.engine == RAY:
        return run_sources_on_cluster(config, sources, settings, console)
    if engine is None:
        engine = load_engine(config, settings)
    else:
        use_threads(config)
    return run_sources(config, sources, engine, console)


def run_sources_on_cluster(config: RunConfig, sources: Sequence[Source], settings: Any, console: Console) -> RunResult:
    """Run the missing samples of some tasks on a cluster; return all results. `settings` is the model's configuration."""
    work = run_on_cluster(config, sources, settings, console)
    busy = [cell.label for cell in work.busy]
    return RunResult(_read(config, work.cells), work.record, work.interrupted, work.savings, busy)


def run_sources(config: RunConfig, sources: Sequence[Source], engine: Engine, console: Console) -> RunResult:
    """Run the missing samples of some tasks under the presses of a configuration; return all results."""
    record = describe_run(config, engine)
    log_run(config.out, record)
    cells = make_cells(config, sources, engine.fingerprint, engine.device, engine.dtype)
    total = sum(cell.weight * len(cell.source.ids) for cell in cells)
    with Interrupt() as interrupt, RunProgress(console, total) as progress:
        prefixes = None if config.prefix_store is None else kvpress.PrefixStore(config.prefix_store)
        results = partial(store_of, config.out)
        job = Job(config, engine, record["run"], progress, interrupt, results, shown=sources[0], prefixes=prefixes)
        busy = _run_sources(job, sources, cells)
        # Another process may have ended without finishing its claimed cells.
        busy = _run_sources(job, sources, busy) if busy and not interrupt.requested else busy
        progress.note(str(job.savings) if job.savings else "")
    record = {**record, "prefills": job.savings.as_dict()}
    log_run(config.out, record)
    return RunResult(_read(config, cells), record, interrupt.requested, job.savings, [cell.label for cell in busy])


def _read(config: RunConfig, cells: Sequence[Cell]) -> list[CellResult]:
    return [read_result(cell.spec, store_of(config.out, cell.id), cell.source.ids) for cell in cells]


def _run_sources(job: Job, sources: Sequence[Source], cells: Sequence[Cell]) -> list[Cell]:
    """Run cells task by task; return the cells that another process has claimed."""
    busy: list[Cell] = []
    for source in sources:
        if not job.interrupt.requested:
            busy += job.run_source(source, [cell for cell in cells if cell.source is source])
    return busy
