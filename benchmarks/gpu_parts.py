# SPDX-License-Identifier: Apache-2.0
"""Parts of the GPU benchmarks, in processes of their own: a crash or a hang costs only one row.

A part prints its plan, then one JSON object per row, as soon as the row is measured, and stops when its time is up. Where a row
ends the process, or takes too long, the part starts again after that row. Rows for which no time was left are reported as
skipped, and rows of an earlier run are not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
GRACE = 10.0
"""Seconds that a part may overrun before it is killed."""

BROKEN = 3
"""Exit code of a part whose device is unusable, as after an illegal address."""

NO_TIME = "no time was left"

Row = dict[str, Any]


class Budget:
    """Time limit in seconds."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Remaining seconds, not below zero."""
        return max(0.0, self.end - time.monotonic())


@dataclass(frozen=True)
class Task:
    """One row of a report."""

    where: Row
    """Keys that name the row."""
    run: Callable[[], Row]
    """Measures the row and returns its figures."""


def emit(row: Row) -> None:
    """Send one row to the parent."""
    print(json.dumps(row), flush=True)


def reason(error: BaseException) -> str:
    """Return an exception in one short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def among(where: Row, rows: Sequence[Row]) -> bool:
    """Return whether one of the rows has this name."""
    return any(where.items() <= row.items() for row in rows)


def attempt(task: Task) -> Row:
    """Return the row of a task: its figures, or the reason that there are none."""
    try:
        return {**task.where, **task.run()}
    except ImportError as error:
        return {**task.where, "missing": reason(error)}
    except Exception as error:  # errors of compilers and drivers are results of this benchmark
        return {**task.where, "failed": reason(error)}


def serve(tasks: Sequence[Task], options: argparse.Namespace) -> None:
    """Run the tasks that are not done yet, until the time is up, and send their rows."""
    budget = Budget(options.seconds)
    done = json.loads(options.done.read_text()) if options.done else []
    emit({"plan": [task.where for task in tasks]})
    for task in tasks:
        if among(task.where, done):
            continue
        if not budget.left:
            return
        emit({"begin": task.where})
        emit(attempt(task))
        release(options.device)
        if not usable(options.device):
            sys.exit(BROKEN)


def release(device: str) -> None:
    """Return memory that no tensor uses to the device."""
    gc.collect()
    if device != "cpu" and usable(device):
        torch.cuda.empty_cache()


def usable(device: str) -> bool:
    """Return whether the device still works; after an error of a kernel it stays unusable."""
    if device == "cpu":
        return True
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def part_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that every part takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, as a test")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--done", type=Path, help="file with the names of rows that are not run again")
    return parser


@dataclass(frozen=True)
class Part:
    """A module of this folder that measures rows."""

    module: str
    arguments: list[str] = field(default_factory=list)
    """Command-line arguments."""
    row_seconds: float = 60.0
    """Time limit of one row, in seconds."""


@dataclass
class Progress:
    """Rows of a running part."""

    plan: list[Row] = field(default_factory=list)
    """Planned rows."""
    begun: list[Row] = field(default_factory=list)
    """Begun rows, and those of an earlier run."""
    current: Row | None = None
    """Row in progress."""

    def rest(self) -> list[Row]:
        """Planned rows that were never begun."""
        return [where for where in self.plan if not among(where, self.begun)]


def run_parts(parts: Sequence[Part], seconds: float, receive: Callable[[Row], None], done: Sequence[Row] = ()) -> None:
    """Run parts side by side and pass on their rows as they come, skipped rows last.

    Args:
        parts: modules and their arguments.
        seconds: time limit of all parts together.
        receive: called with each row, never by two threads at a time.
        done: rows of an earlier run.
    """
    budget, lock = Budget(seconds), threading.Lock()

    def locked(row: Row) -> None:
        with lock:
            receive(row)

    with ThreadPoolExecutor(len(parts)) as pool:
        for future in [pool.submit(_run, part, budget, locked, done) for part in parts]:
            future.result()


@dataclass(frozen=True)
class Ending:
    """Reason that a process of a part ended early."""

    why: str
    broken: bool = False
    """Whether its device was unusable after a row."""


def _run(part: Part, budget: Budget, receive: Callable[[Row], None], done: Sequence[Row]) -> None:
    progress = Progress(begun=list(done))
    while (ending := _run_process(part, budget, progress, receive)) is not None:
        where, progress.current = progress.current, None
        if where is not None:
            receive({**where, "failed" if budget.left else "skipped": ending.why})
        elif not ending.broken:
            receive({"part": part.module, "failed": ending.why})
            break
        if not budget.left:
            break
    for where in progress.rest():
        receive({**where, "skipped": NO_TIME if not budget.left else "its part ended before"})


def _run_process(part: Part, budget: Budget, progress: Progress, receive: Callable[[Row], None]) -> Ending | None:
    """Run a part once, from the first row that was not begun; return the reason that it ended early, or None."""
    with tempfile.TemporaryDirectory() as folder:
        done, log = Path(folder) / "done.json", Path(folder) / "log"
        done.write_text(json.dumps(progress.begun))
        options = ["--seconds", f"{budget.left:.1f}", "--done", str(done)]
        command = [sys.executable, "-m", f"benchmarks.{part.module}", *part.arguments, *options]
        with log.open("w") as stderr:
            process = subprocess.Popen(  # noqa: S603 - our own module, with compilers that it starts in a group of its own
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
            )
            with Watchdog(process, part.row_seconds, budget) as watchdog:
                for line in process.stdout or ():
                    watchdog.arm()
                    _note(line, progress, receive)
                code = process.wait()
        last = (log.read_text().strip().splitlines() or [""])[-1][:200]
    if code == 0:
        return None
    if watchdog.barked:
        return Ending(f"took longer than {part.row_seconds:.0f} s" if budget.left else NO_TIME)
    return Ending(f"exit code {code}: {last}", broken=code == BROKEN)


def _note(line: str, progress: Progress, receive: Callable[[Row], None]) -> None:
    """Read one line of a part; lines that are not JSON are ignored."""
    try:
        row = json.loads(line)
    except ValueError:
        return
    if "plan" in row:
        progress.plan = row["plan"]
    elif "begin" in row:
        progress.current = row["begin"]
        progress.begun.append(row["begin"])
    else:
        progress.current = None
        receive(row)


class Watchdog:
    """Ends a process that prints nothing for a given time, or overruns the budget."""

    def __init__(self, process: subprocess.Popen[str], seconds: float, budget: Budget) -> None:
        self.process, self.seconds, self.budget, self.barked = process, seconds, budget, False
        self.timer: threading.Timer | None = None

    def __enter__(self) -> Watchdog:
        self.arm()
        return self

    def __exit__(self, *error: object) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def arm(self) -> None:
        """Restart the timer."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = threading.Timer(min(self.seconds, self.budget.left + GRACE), self._bark)
        self.timer.daemon = True
        self.timer.start()

    def _bark(self) -> None:
        self.barked = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
