# SPDX-License-Identifier: Apache-2.0
"""Parts of the GPU benchmarks run in processes of their own: a row that crashes or hangs costs only itself.

A part prints its plan, then one JSON object per row, as soon as it has it, and stops when its seconds are spent. Where a row
ends the process, or takes too long, the part begins again behind it. Rows without time are named as skipped.
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
"""Seconds that a part may overrun before it is ended."""

BROKEN = 3
"""Exit code of a part whose device is of no use any more, as after an illegal address."""

NO_TIME = "no time was left"

Row = dict[str, Any]


class Budget:
    """Seconds that may be spent."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, not below zero."""
        return max(0.0, self.end - time.monotonic())


@dataclass(frozen=True)
class Task:
    """One row of a report: `where` names it, `run` measures it and returns its figures."""

    where: Row
    run: Callable[[], Row]


def emit(row: Row) -> None:
    """Send one row to the parent."""
    print(json.dumps(row), flush=True)


def reason(error: BaseException) -> str:
    """Return an exception in one short line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def attempt(task: Task) -> Row:
    """Return the row of a task: its figures, or why there are none."""
    try:
        return {**task.where, **task.run()}
    except ImportError as error:
        return {**task.where, "missing": reason(error)}
    except Exception as error:  # errors of compilers and drivers are findings, not the end
        return {**task.where, "failed": reason(error)}


def serve(tasks: Sequence[Task], options: argparse.Namespace) -> None:
    """Run the tasks that are not done yet, as far as time goes, and send their rows."""
    budget = Budget(options.seconds)
    done = json.loads(options.done.read_text()) if options.done else []
    emit({"plan": [task.where for task in tasks]})
    for task in tasks:
        if task.where in done:
            continue
        if not budget.left:
            return
        emit({"begin": task.where})
        emit(attempt(task))
        release(options.device)
        if not usable(options.device):
            sys.exit(BROKEN)


def release(device: str) -> None:
    """Give memory that no tensor holds back to the device."""
    gc.collect()
    if device != "cpu" and usable(device):
        torch.cuda.empty_cache()


def usable(device: str) -> bool:
    """Whether the device still works; an error of a kernel stays for good."""
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
    parser.add_argument("--small", action="store_true", help="tiny sizes, to exercise the logic")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--done", type=Path, help="file with the names of rows that are not run again")
    return parser


@dataclass(frozen=True)
class Part:
    """A module of this folder, its arguments, and the seconds that one row of it may take."""

    module: str
    arguments: list[str] = field(default_factory=list)
    row_seconds: float = 60.0


@dataclass
class Progress:
    """Planned rows, begun rows, and the row in progress of a running part."""

    plan: list[Row] = field(default_factory=list)
    begun: list[Row] = field(default_factory=list)
    current: Row | None = None

    def rest(self) -> list[Row]:
        """Planned rows that were never begun."""
        return [where for where in self.plan if where not in self.begun]


def run_parts(parts: Sequence[Part], seconds: float, receive: Callable[[Row], None]) -> None:
    """Run parts side by side and pass on their rows as they come, skipped rows last.

    Args:
        parts: modules and their arguments.
        seconds: time limit of all parts together.
        receive: called with each row, never by two threads at a time.
    """
    budget, lock = Budget(seconds), threading.Lock()

    def locked(row: Row) -> None:
        with lock:
            receive(row)

    with ThreadPoolExecutor(len(parts)) as pool:
        for future in [pool.submit(_run, part, budget, locked) for part in parts]:
            future.result()


@dataclass(frozen=True)
class Ending:
    """Why a process of a part ended early; `broken` where its device was of no use after a row."""

    why: str
    broken: bool = False


def _run(part: Part, budget: Budget, receive: Callable[[Row], None]) -> None:
    progress = Progress()
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
    """Run a part once, from its first row that was not begun; return why it ended early, or None."""
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
    """Take in one line of a part; lines that are not JSON are ignored."""
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
    """Ends a process that prints nothing for so many seconds, or overruns the budget."""

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
        """Begin to wait anew."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = threading.Timer(min(self.seconds, self.budget.left + GRACE), self._bark)
        self.timer.daemon = True
        self.timer.start()

    def _bark(self) -> None:
        self.barked = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
