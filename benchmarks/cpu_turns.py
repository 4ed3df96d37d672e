# SPDX-License-Identifier: Apache-2.0
"""Contenders in processes of their own that take turns, so that a slow phase of the machine slows all of them alike.

A process prepares one contender, reports its answers and its bytes, and then takes a turn at each request:

    python -m benchmarks.cpu_turns layer "ours int4" '{"tokens": 8192, ...}'

serves requests from its standard input and writes figures to its standard output, one JSON object a line. Such a process
imports only what its contender needs, because its memory is reported.
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
"""Name of the reference answers, used in the place of a contender."""


@dataclass(frozen=True)
class Setting:
    """Problem that contenders are prepared for."""

    tokens: int
    """Tokens in the cache."""
    prompt: int
    """Length of the prompt, for contenders that read prompts."""
    threads: int
    """Threads of a contender."""
    levels: tuple[str, ...]
    """Instruction-set levels at which ours take their turns, slowest first."""
    folder: str
    """Folder for files that several contenders need."""


@dataclass
class Built:
    """A contender that is ready."""

    step: Callable[[], Array]
    """Runs one decode step; returns the answer that is compared with the reference."""
    cache_bytes: int
    """Bytes of the cached tokens."""
    turn_context: Callable[[], AbstractContextManager[object]] = nullcontext
    """Context in which the steps of a turn run."""
    prefill: Callable[[], object] | None = None
    """Reads a prompt into a new cache."""


@dataclass(frozen=True)
class Contender:
    """Recipe of a contender."""

    bits: float | None
    """Bits per value; None where bits do not describe the contender."""
    build: Callable[[Setting], Built]
    judged: bool = True
    """Whether its answer is compared with the reference."""
    every_level: bool = True
    """Whether ours take turns at every level."""

    def levels(self, name: str, setting: Setting) -> tuple[str | None, ...]:
        """Return the levels at which it takes turns; contenders that are not ours choose for themselves."""
        if not name.startswith("ours"):
            return (None,)
        return setting.levels if self.every_level else setting.levels[-1:]


class WorkerError(RuntimeError):
    """A contender cannot be prepared, or died."""


class Worker:
    """A process that serves one contender.

    Args: part: what is measured: `layer` or `model`. name: name of the contender. setting: problem that it is prepared for.
    seconds: time limit of a request.
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

    def send(self, request: str | None = None) -> dict[str, Any]:
        """Return the answer to a request, or the first message of the process.

        Raises:
            WorkerError: the process reports a fault, dies, or takes too long.
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


def serve(part: str, name: str, setting: Setting, reply: Callable[..., None]) -> None:
    """Prepare a contender and take a turn for each request."""
    module = importlib.import_module(f"benchmarks.cpu_{part}")
    if name == EXACT:
        reply(answers=module.exact(setting).tolist())
        return
    contender: Contender = module.CONTENDERS[name]
    streamed = np.ones(module.STREAMED // 4, np.float32)
    built = contender.build(setting)
    answers = []
    for level in contender.levels(name, setting):
        _use(level)
        with built.turn_context():
            answers.append(built.step().astype(float).ravel().tolist())
    reply(answers=answers, cache_bytes=built.cache_bytes, prefills=built.prefill is not None)
    _forget_peak()

    def turn(level: str | None) -> float:
        _use(level)
        with built.turn_context():
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
            reply(milliseconds=[turn(level) for level in contender.levels(name, setting)])
        elif request == "peak":
            reply(mib=(_peak_bytes() - streamed.nbytes) / 2**20)
        elif request == "prefill" and built.prefill is not None:
            started = time.perf_counter()
            built.prefill()
            reply(seconds=time.perf_counter() - started)


def _use(level: str | None) -> None:
    if level is not None:
        from benchmarks.levels import use

        use(level)


def _forget_peak() -> None:
    """Reset the peak memory, so that it does not include the preparation."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    part, name, setting = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print to standard output

    def reply(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    values = json.loads(setting)
    try:
        serve(part, name, Setting(**{**values, "levels": tuple(values["levels"])}), reply)
    except Exception as error:
        reply(failed=reason(error))


if __name__ == "__main__":
    main()
