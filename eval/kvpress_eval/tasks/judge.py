# SPDX-License-Identifier: Apache-2.0
"""Compare mathematical answers in a process that can be killed, since the comparison of a generated text may never end.

The package math-verify limits its time by signals. These reach only the main thread of a process, and do not interrupt the
arithmetic of a power tower.
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
"""Timeout for one comparison; math-verify stops after 10 seconds where it can."""
_MOST = 4000
"""Characters at the end of a text that are searched for the final answer."""
_lock = threading.Lock()
_running: list[subprocess.Popen[bytes]] = []


def judge(right: str, text: str) -> bool:
    """Return whether the final answer of a text equals the right one, which is LaTeX; False after a timeout."""
    with _lock:
        # The process leaves the list until it has answered, so that an interrupted call cannot give its answer to the next.
        process = _running.pop() if _running else _start()
        requests, replies = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        with contextlib.suppress(OSError):
            requests.write(json.dumps([right, text[-_MOST:]]).encode() + b"\n")
            requests.flush()
            if line := _line(replies):
                _running.append(process)
                return bool(json.loads(line))
        process.kill()
        process.wait()
        requests.close()
        replies.close()
        return False


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvpress_eval.tasks.judge"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603 - fixed words


def _line(pipe: IO[bytes]) -> bytes:
    """Return the next line of a pipe, empty after a timeout; a thread reads it, as Windows cannot wait for pipes."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=lambda: lines.put(pipe.readline()), daemon=True).start()
    try:
        return lines.get(timeout=_SECONDS)
    except queue.Empty:
        return b""


def _serve(requests: IO[str], replies: IO[str]) -> None:
    """Compare pairs of answers, one per line, until the input ends."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the run, which then closes the input
    for line in requests:
        right, text = json.loads(line)
        print(json.dumps(_equal(parse, verify, right, text)), file=replies, flush=True)


def _equal(parse: Any, verify: Any, right: str, text: str) -> bool:
    try:
        return bool(verify(parse(f"${right}$"), parse(text)))
    except Exception:  # an answer that sympy cannot read is wrong
        return False


if __name__ == "__main__":
    _serve(sys.stdin, sys.stdout)
