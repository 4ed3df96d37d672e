# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and SIGTERM, from the start of a command to the end of its process."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED, TERMINATED = 130, 143
"""128 plus the signal number, the exit code of a shell for a process stopped by a signal."""
_SHOW_CURSOR = "\x1b[?25h"
"""Terminal code that shows the cursor, which a progress bar hides."""


class Terminated(KeyboardInterrupt):
    """The process was stopped by SIGTERM."""


def run_command(command: Callable[[], Any]) -> Any:
    """Run a command line so that the first signal decides its exit code.

    The first signal raises `KeyboardInterrupt` or `Terminated`. An exception from a second signal could change the exit code
    from inside any `except` or `finally` clause. So a second signal ends the process at once, with the code of the first. A
    signal while the interpreter exits keeps the code of the command.
    """
    signals = _Signals()
    signals.install()
    try:
        try:
            result = command()
        except SystemExit as end:
            if signals.code is not None:
                raise SystemExit(signals.code) from None
            signals.code = _number(end.code)
            raise
        except Exception:
            signals.code = 1 if signals.code is None else signals.code
            raise
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED if signals.code is None else signals.code) from None
    signals.remove()
    return result


class _Signals:
    """Handlers of SIGINT and SIGTERM."""

    def __init__(self) -> None:
        self.code: int | None = None
        """Exit code of the process, once decided."""
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Install the handlers if this is the main thread; Python allows no other."""
        if threading.current_thread() is not threading.main_thread():
            return
        # Runs after all other exit functions. The interpreter then resets its handlers, but not ignored signals.
        atexit.register(self._ignore)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)

    def remove(self) -> None:
        """Restore the earlier handlers, for a command line that was called as a function."""
        atexit.unregister(self._ignore)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.code is not None:
            _leave(self.code)
        self.code = 128 + number
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    def _ignore(self) -> None:
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)


def _number(code: Any) -> int:
    """Return the exit code of a `SystemExit`, whose `code` is an integer, None for 0, or a message for 1."""
    return code if isinstance(code, int) else int(code is not None)


def _leave(code: int) -> NoReturn:
    """End the process without unwinding. Finished results are on disk already."""
    for stream in (sys.stdout, sys.stderr):
        # A write that the signal interrupted may hold the stream, which then raises an error here.
        with contextlib.suppress(Exception):
            if stream.isatty():
                stream.write(_SHOW_CURSOR)
            stream.flush()
    os._exit(code)
