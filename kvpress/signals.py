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
"""128 and the number of the signal, as a shell reports a process that it ended."""
_SHOW_CURSOR = "\x1b[?25h"
"""A progress bar hides the cursor of its terminal."""


class Terminated(KeyboardInterrupt):
    """The process was stopped by SIGTERM."""


def run_command(command: Callable[[], Any]) -> Any:
    """Run a command line whose exit code holds whenever a second signal arrives; afterwards signals end the process.

    The first signal raises `KeyboardInterrupt` or `Terminated`, once in the life of the process. A second exception could be
    raised anywhere while the first one unwinds, in an `except` or `finally` clause too, and would decide the exit code. So a
    second signal ends the process with the code of the first, and one that comes while the interpreter exits with the code
    that the command has.
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
    """Handlers of SIGINT and SIGTERM; `code` is the exit code of the process once it is decided."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._previous: dict[int, Any] = {}

    def install(self) -> None:
        """Handle the signals, if this is the main thread: Python allows it there only."""
        if threading.current_thread() is not threading.main_thread():
            return
        # Runs last of all exit functions. The interpreter then resets its handlers, but leaves a signal that is ignored.
        atexit.register(self._ignore)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)

    def remove(self) -> None:
        """Restore the handlers from before, where the command line was called as a function."""
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
    """End the process without unwinding; finished results are on disk already."""
    for stream in (sys.stdout, sys.stderr):
        # The signal may have arrived while the stream was writing, which cannot be entered twice.
        with contextlib.suppress(Exception):
            if stream.isatty():
                stream.write(_SHOW_CURSOR)
            stream.flush()
    os._exit(code)
