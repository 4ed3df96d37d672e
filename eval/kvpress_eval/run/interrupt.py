# SPDX-License-Identifier: Apache-2.0
"""Signals during a run: the first Ctrl-C stops after the sample in flight; a second one, or SIGTERM, stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from kvpress.signals import Terminated


class Interrupt:
    """Context in which the first SIGINT only sets `requested`; a second SIGINT, or SIGTERM, raises.

    These signals go to the previous handlers if those are functions. The handlers of a command raise once, and end the process
    at the next signal (`kvpress.signals`).
    """

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
            self._hand_on(number, frame)
            raise KeyboardInterrupt
        self.requested = True

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._hand_on(number, frame)
        raise Terminated

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)
