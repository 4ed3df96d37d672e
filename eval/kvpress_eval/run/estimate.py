# SPDX-License-Identifier: Apache-2.0
"""Estimate of a run before it starts: cells, planned memory, and time from earlier samples or the speed of this machine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

import kvpress
from kvpress.cache.report import format_bytes
from kvpress.hf.generation.clock import now
from kvpress.plan import Plan, plan
from kvpress_eval.common.errors import ConfigError
from kvpress_eval.common.terminal import MISSING, Name, plain_table
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.store import Row, read_rows, store_of
from kvpress_eval.run.cells import Cell, make_cells
from kvpress_eval.run.models import Shape, device_of, fingerprint, shape_of, source_of, use_threads
from kvpress_eval.run.runner import prepare
from kvpress_eval.tasks.source import Source

_SIDES, _MOMENT, _READ_BYTES, _ROUNDS = (128, 256, 512, 1024, 2048), 0.01, 2**27, 5
"""Speed test of a device: sides of square matrices, tried until one product takes `_MOMENT` seconds; bytes to read; and the
number of repetitions. Small matrices come first, because a processor without bfloat16 is a hundred times slower."""


@dataclass(frozen=True)
class Machine:
    """Speed of a device on large products (operations per second) and long reads (bytes per second)."""

    flops: float
    bandwidth: float


@dataclass(frozen=True)
class PressEstimate:
    """One press over all cells of a run."""

    press: str
    samples: int
    done: int
    cache_bytes: int | None
    """Held bytes for the longest contexts; None if the tasks have no length."""
    peak_bytes: int | None
    """Peak bytes while these contexts are read; None if the tasks have no length."""
    seconds: float
    """Time of the missing samples, with answers of the maximum length."""


@dataclass(frozen=True)
class RunEstimate:
    """Estimate of a run."""

    config: RunConfig
    presses: Sequence[PressEstimate]
    weight_bytes: int
    cache_bytes: int
    """Held bytes of all caches of a batch."""
    peak_bytes: int
    """Most bytes of these caches at any time: those of all presses, and the peak of the press whose reading adds most."""
    seconds: float
    measured: bool

    def show(self, console: Console) -> None:
        """Print the samples, memory and time of the run."""
        word = "about" if self.measured else "at least"
        table = plain_table(["press"], ["samples", "done", "cache", "peak", f"alone {word}"])
        for row in self.presses:
            sizes = (MISSING if size is None else format_bytes(size) for size in (row.cache_bytes, row.peak_bytes))
            table.add_row(Name(row.press), str(row.samples), str(row.done), *sizes, _time(row.seconds))
        console.print(Text(f"{self.config.model}: {', '.join(self.config.tasks)}", style="bold"))
        console.print(table)
        source = "from earlier samples" if self.measured else "as fast as this machine multiplies and reads"
        console.print(
            f"memory about {format_bytes(self.weight_bytes + self.peak_bytes)}: weights {format_bytes(self.weight_bytes)}, "
            f"all caches of a batch of {self.config.batch_size} {format_bytes(self.cache_bytes)}, at most "
            f"{format_bytes(self.peak_bytes)} while contexts are read; activations come on top",
            highlight=False,
        )
        console.print(
            f"time {word} {_time(self.seconds)}, {source}; contexts are read once for all presses that share them",
            highlight=False,
        )


def estimate(config: RunConfig) -> RunEstimate:
    """Estimate a run from the model's configuration, the existing results in its folder, and a speed test of a second.

    Raises:
        ConfigError: a press does not suit a length.
    """
    config, sources, settings = prepare(config)
    shape = shape_of(config, settings)
    machine = measure_machine(config, shape.geometry.dtype)
    device, dtype = device_of(config), str(shape.geometry.dtype).removeprefix("torch.")
    cells = make_cells(config, sources, fingerprint(source_of(config), settings), torch.device(device).type, dtype)
    presses, answering, measured = [], 0.0, False
    reading: dict[tuple[Any, ...], float] = {}
    for press in config.presses:
        press_cells = [cell for cell in cells if cell.press == press]
        rows = {cell.id: _rows(config, cell) for cell in press_cells}
        measured |= any(rows.values())
        lengths = {context_length(config, cell.source) for cell in press_cells} - {0}
        plans = {length: planned(config, press, length, shape) for length in lengths}
        caches = {length: planned_size.total_bytes for length, planned_size in plans.items()}
        peaks = (max(item.total_bytes, item.peak_bytes) for item in plans.values())
        seconds = 0.0
        for cell in press_cells:
            missing = len(cell.source.ids) - len(rows[cell.id])
            cache = caches.get(context_length(config, cell.source), 0)
            read, answer = cell_seconds(config, cell, rows[cell.id], shape, machine, cache)
            shared = kvpress.get_press(press).recipe().shares_prefill
            key = (cell.source.task, cell.source.length, cell.depth, "" if shared else press)
            reading[key] = max(reading.get(key, 0.0), read * missing)
            answering += answer * missing
            seconds += (read + answer) * missing
        samples, done = sum(len(cell.source.ids) for cell in press_cells), sum(map(len, rows.values()))
        sizes = max(caches.values(), default=None), max(peaks, default=None)
        presses.append(PressEstimate(press, samples, done, *sizes, seconds))
    together = sum(item.cache_bytes or 0 for item in presses)
    peak = together + max((item.peak_bytes or 0) - (item.cache_bytes or 0) for item in presses)
    return RunEstimate(config, presses, shape.weight_bytes, together, peak, sum(reading.values()) + answering, measured)


def context_length(config: RunConfig, source: Source) -> int:
    """Return the most tokens of a context; 0 if the task decides its length and the run does not limit it."""
    return min(filter(None, (source.length, config.max_context_length)), default=0)


def _rows(config: RunConfig, cell: Cell) -> list[Row]:
    """Return the existing rows of the samples of the run."""
    rows, _, _ = read_rows(store_of(config.out, cell.id).rows_path)
    return [row for row in rows if row["sample"] in cell.source.ids]


def planned(config: RunConfig, press: str, length: int, shape: Shape) -> Plan:
    """Return the planned memory of the caches of one batch under a press."""
    try:
        return plan(kvpress.get_press(press), shape.geometry, length, config.batch_size)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"press {press!r} at {length} tokens: {error}") from error


def cell_seconds(
    config: RunConfig, cell: Cell, rows: Sequence[Row], shape: Shape, machine: Machine, cache: int
) -> tuple[float, float]:
    """Return the seconds to read a context and to answer: from earlier samples, or from the speed of the machine."""
    step = (shape.weight_bytes + cache) / config.batch_size / machine.bandwidth
    timed = [row["measured"] for row in rows]
    steps = [times["seconds_per_token"] for times in timed if times["seconds_per_token"]]
    read = (
        median(times["prefill_seconds"] for times in timed)
        if timed
        else shape.prefill_flops(context_length(config, cell.source)) / machine.flops
    )
    return read, cell.source.max_new_tokens * (median(steps) if steps else step)


def measure_machine(config: RunConfig, dtype: torch.dtype) -> Machine:
    """Measure large products and long reads in the dtype and with the threads of the run."""
    use_threads(config)
    device = torch.device(device_of(config))
    block = torch.ones(_READ_BYTES // 4, dtype=torch.float32, device=device)
    return Machine(flops=_flops(dtype, device), bandwidth=_READ_BYTES / _best(block.sum, device))


def _flops(dtype: torch.dtype, device: torch.device) -> float:
    """Return the operations per second of the first product, by size, that takes at least `_MOMENT` seconds."""
    reached = 0.0
    for side in _SIDES:
        matrix = torch.ones(side, side, dtype=dtype, device=device)
        seconds = _best(functools.partial(torch.matmul, matrix, matrix), device)
        reached = 2 * side**3 / seconds
        if seconds >= _MOMENT:
            break
    return reached


def _best(work: Callable[[], Any], device: torch.device) -> float:
    work()
    times = []
    for _ in range(_ROUNDS):
        started = now(device)
        work()
        times.append(now(device) - started)
    return min(times)


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=round(seconds)))
