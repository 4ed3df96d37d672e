# SPDX-License-Identifier: Apache-2.0
"""Contenders in processes of their own that take turns, so that whatever slows the machine down slows all of them alike.

A process prepares one contender, says what it answers and what it holds, and is then asked for a turn, round after round:

    python -m benchmarks.cpu_turns layer "ours int4" '{"tokens": 8192, ...}'

serves requests, one JSON object a line, from its standard input. What it measures is handed over the same way. Such a process
imports nothing that its contender does not need: its memory is reported.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.gpu_parts import ROOT, reason

Array = npt.NDArray[Any]
EXACT = "exact"
"""Stands for what the answers are judged by, instead of a contender."""


@dataclass(frozen=True)
class Setting:
    """What contenders are prepared for: `tokens` that are held, and a `prompt` to read where they read prompts."""

    tokens: int
    prompt: int
    threads: int
    levels: tuple[str, ...]
    """Instruction-set levels that ours take their turns at, slowest first."""
    folder: str
    """Where files are kept that several contenders need."""


@dataclass
class Built:
    """A contender that is ready."""

    step: Callable[[], Array]
    """Makes one decode step; returns what is judged."""
    cache_bytes: int
    """What it holds of the tokens."""
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    """What the steps of a turn run in."""
    prefill: Callable[[], object] | None = None
    """Reads a prompt into a cache of its own."""


@dataclass(frozen=True)
class Contender:
    """How to prepare one."""

    bits: float | None
    """Per value; None where bits are not what it is about."""
    build: Callable[[Setting], Built]
    judged: bool = True
    """Whether what it answers means something."""
    every_level: bool = True

    def levels(self, name: str, setting: Setting) -> tuple[str | None, ...]:
        """Levels that it takes turns at; others than ours choose for themselves."""
        if not name.startswith("ours"):
            return (None,)
        return setting.levels if self.every_level else setting.levels[-1:]


class WorkerError(RuntimeError):
    """A contender cannot be prepared, or died."""


class Worker:
    """A process that serves one contender.

    Args:
        part: what is measured: `layer` or `model`.
        name: of the contender.
        setting: what it is prepared for.
        seconds: that any request may take.
    """

    def __init__(self, part: str, name: str, setting: Setting, seconds: float) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the worker
        self.seconds = seconds
        path = os.pathsep.join([str(ROOT), str(ROOT / "eval"), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", "benchmarks.cpu_turns", part, name, json.dumps(asdict(setting))],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(setting.threads), "PYTHONPATH": path},
        )  # fmt: skip

    def ask(self, request: str | None = None) -> dict[str, Any]:
        """Return the answer to a request, or what the process says first.

        Raises:
            WorkerError: it says why it cannot, dies, or takes too long.
        """
        assert self.process.stdin is not None  # noqa: S101 - both are pipes
        assert self.process.stdout is not None  # noqa: S101
        late = threading.Timer(self.seconds, self.process.kill)
        late.start()
        with contextlib.suppress(BrokenPipeError):
            if request is not None:
                print(request, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        in_time = late.is_alive()
        late.cancel()
        if not line:
            raise WorkerError(self._end() if in_time else f"took more than {self.seconds:.0f} s")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise WorkerError(answer["failed"])
        return answer

    def _end(self) -> str:
        code = self.process.wait()
        self.log.seek(0)
        last = self.log.read().strip().splitlines()[-1:] or [""]
        return f"the process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}: {last[0][:200]}"

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()
        self.log.close()


def serve(part: str, name: str, setting: Setting, say: Callable[..., None]) -> None:
    """Prepare a contender and take the turns that are asked for."""
    module = importlib.import_module(f"benchmarks.cpu_{part}")
    if name == EXACT:
        say(answers=module.exact(setting).tolist())
        return
    contender: Contender = module.CONTENDERS[name]
    streamed = np.ones(module.STREAMED // 4, np.float32)
    built = contender.build(setting)
    answers = []
    for level in contender.levels(name, setting):
        _use(level)
        with built.around():
            answers.append(built.step().astype(float).ravel().tolist())
    say(answers=answers, cache_bytes=built.cache_bytes, prefills=built.prefill is not None)
    _forget_peak()

    def turn(level: str | None) -> float:
        _use(level)
        with built.around():
            for _ in range(module.WARM_STEPS):
                built.step()
            streamed.sum()
            started = time.perf_counter()
            for _ in range(module.STEPS):
                built.step()
            return (time.perf_counter() - started) / module.STEPS * 1e3

    for line in sys.stdin:
        request = line.strip()
        if request == "turn":
            say(milliseconds=[turn(level) for level in contender.levels(name, setting)])
        elif request == "peak":
            say(mib=(_peak_bytes() - streamed.nbytes) / 2**20)
        elif request == "prefill" and built.prefill is not None:
            started = time.perf_counter()
            built.prefill()
            say(seconds=time.perf_counter() - started)


def _use(level: str | None) -> None:
    if level is not None:
        from benchmarks.levels import use

        use(level)


def _forget_peak() -> None:
    """Let what preparing took be no part of the peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    part, name, setting = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print what they like

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    held = json.loads(setting)
    try:
        serve(part, name, Setting(**{**held, "levels": tuple(held["levels"])}), say)
    except Exception as error:
        say(failed=reason(error))


if __name__ == "__main__":
    main()
