# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C in a run: the first one finishes the sample in flight, the second one stops at once; SIGTERM does not wait."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from kvpress.signals import Terminated


class Interrupt:
    """Inside the `with` block the first SIGINT only sets `requested`; a second one, and SIGTERM, raise.

    They go to the handlers from before the block where these are functions: the handlers of a command raise once, and end the
    process at the next signal (`kvpress.signals`).
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
