"""Runs the cells of a configuration, and never loses a finished sample.

All presses of a task and length go through its contexts together, so that a context is read once for all of them. Cells are
claimed one by one: several processes can share an output folder, and each cell is run by one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from kvpress_eval.cells import Cell, Source, expand_tasks, make_cells
from kvpress_eval.config import RunConfig
from kvpress_eval.environment import describe_run
from kvpress_eval.errors import BusyError
from kvpress_eval.interrupt import Interrupt
from kvpress_eval.job import Job, Savings
from kvpress_eval.models import Engine, check_lengths, load_engine, use_threads
from kvpress_eval.output import cell_store, log_run, make_folder
from kvpress_eval.progress import RunProgress
from kvpress_eval.results import CellResult, read_result

FAILED, INTERRUPTED = 1, 130


@dataclass(frozen=True)
class RunResult:
    """The cells of a run and the record of the invocation that completed them; `busy` ones were left to other processes."""

    cells: Sequence[CellResult]
    record: dict[str, Any]
    interrupted: bool
    savings: Savings
    busy: Sequence[str] = field(default_factory=tuple)

    @property
    def exit_code(self) -> int:
        """0 if every cell has its result."""
        if self.interrupted:
            return INTERRUPTED
        if all(cell.complete for cell in self.cells):
            return 0
        return BusyError.exit_code if self.busy else FAILED


def prepare(config: RunConfig, engine: Engine | None = None) -> list[Source]:
    """Check what can be checked without the weights, and return the tasks; data is read, so that a missing file is known."""
    sources = expand_tasks(config)
    check_lengths(config, engine)
    make_folder(config.out)
    return sources


def run(config: RunConfig, console: Console, engine: Engine | None = None) -> RunResult:
    """Run what is missing of a configuration, on an engine if one is ready; return all of its results."""
    sources = prepare(config, engine)
    if engine is None:
        engine = load_engine(config)
    else:
        use_threads(config)
    record = describe_run(config, engine)
    log_run(config.out, record)
    cells = make_cells(config, sources, engine.fingerprint, engine.device, engine.dtype)
    total = sum(cell.weight * config.samples for cell in cells)
    with Interrupt() as interrupt, RunProgress(console, total) as progress:
        job = Job(config, engine, record["run"], progress, interrupt, shown=sources[0])
        busy = _run_sources(job, sources, cells)
        # Another process may have ended without finishing what it had claimed.
        busy = _run_sources(job, sources, busy) if busy and not interrupt.requested else busy
        progress.note(str(job.savings) if job.savings else "")
    record = {**record, "prefills": job.savings.as_dict()}
    log_run(config.out, record)
    results = [read_result(cell, cell_store(config.out, cell), cell.source.sample_ids(config)) for cell in cells]
    return RunResult(results, record, interrupt.requested, job.savings, [cell.label for cell in busy])


def _run_sources(job: Job, sources: Sequence[Source], cells: Sequence[Cell]) -> list[Cell]:
    """Run cells task by task; return those that another process has claimed."""
    busy: list[Cell] = []
    for source in sources:
        if not job.interrupt.requested:
            busy += job.run_source(source, [cell for cell in cells if cell.source is source])
    return busy
