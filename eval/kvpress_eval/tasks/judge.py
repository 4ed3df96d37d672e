# SPDX-License-Identifier: Apache-2.0
"""Whether two mathematical answers are equal, asked of a process that can be stopped: what a model writes may take for ever.

The package math-verify limits its time by signals, which only the main thread of a process gets, and which do not interrupt
the arithmetic of a power tower.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import signal
import subprocess
import sys
import threading
from typing import IO, Any, cast

_SECONDS = 20
"""How long an answer may take to judge; the process itself gives up after 10 where it can."""
_MOST = 4000
"""Characters at the end of a text, where the final answer stands, that are looked at."""
_lock = threading.Lock()
_running: list[subprocess.Popen[bytes]] = []


def judge(right: str, text: str) -> bool:
    """Return whether the final answer of a text equals the right one, which is LaTeX; False where that takes too long."""
    with _lock:
        # An interrupted question is never answered later: its process is out of the list until it has answered.
        process = _running.pop() if _running else _start()
        asked, said = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        with contextlib.suppress(OSError):
            asked.write(json.dumps([right, text[-_MOST:]]).encode() + b"\n")
            asked.flush()
            if line := _line(said):
                _running.append(process)
                return bool(json.loads(line))
        process.kill()
        process.wait()
        asked.close()
        said.close()
        return False


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvpress_eval.tasks.judge"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 - fixed words


def _line(said: IO[bytes]) -> bytes:
    """Return the next line of a pipe, nothing if it takes too long; a thread reads it, as Windows cannot wait for pipes."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=lambda: lines.put(said.readline()), daemon=True).start()
    try:
        return lines.get(timeout=_SECONDS)
    except queue.Empty:
        return b""


def _serve(asked: IO[str], said: IO[str]) -> None:
    """Judge pairs, one a line, until there are no more."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then has no more questions
    for line in asked:
        right, text = json.loads(line)
        print(json.dumps(_equal(parse, verify, right, text)), file=said, flush=True)


def _equal(parse: Any, verify: Any, right: str, text: str) -> bool:
    try:
        return bool(verify(parse(f"${right}$"), parse(text)))
    except Exception:  # a text that sympy fails at is no right answer
        return False


if __name__ == "__main__":
    _serve(sys.stdin, sys.stdout)
