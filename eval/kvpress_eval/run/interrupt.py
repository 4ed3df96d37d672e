# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C: the first one finishes the sample in flight, the second one stops at once; SIGTERM does not wait either."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

INTERRUPTED, TERMINATED = 130, 143
"""128 and the number of the signal, as a shell reports a process that it ended."""


class Terminated(KeyboardInterrupt):
    """The process was told to end (SIGTERM); every finished sample is on disk already."""


class Interrupt:
    """Inside the `with` block the first SIGINT only sets `requested`, and SIGTERM raises `Terminated`."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        # Python delivers signals to the main thread only, and only there may handlers be set.
        if threading.current_thread() is threading.main_thread():
            for number, handle in ((signal.SIGINT, self._interrupt), (signal.SIGTERM, self._terminate)):
                self._previous[number] = signal.signal(number, handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handle in self._previous.items():
            signal.signal(number, handle)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        raise Terminated
