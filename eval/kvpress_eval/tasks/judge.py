# SPDX-License-Identifier: Apache-2.0
"""Whether two mathematical answers are equal, asked of a process that can be stopped: what a model writes may take for ever.

The package math-verify limits its time by signals, which only the main thread of a process gets, and which do not interrupt
the arithmetic of a power tower.
"""

from __future__ import annotations

import contextlib
import json
import logging
import select
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
        if not _running:
            command = [sys.executable, "-m", "kvpress_eval.tasks.judge"]
            _running.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))  # noqa: S603
        process = _running[0]
        asked, said = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        with contextlib.suppress(OSError):
            asked.write(json.dumps([right, text[-_MOST:]]).encode() + b"\n")
            asked.flush()
            if select.select([said], [], [], _SECONDS)[0] and (line := said.readline()):
                return bool(json.loads(line))
        _running.clear()
        process.kill()
        process.wait()
        asked.close()
        said.close()
        return False


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
