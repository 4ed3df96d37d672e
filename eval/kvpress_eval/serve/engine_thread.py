# SPDX-License-Identifier: Apache-2.0
"""Thread of an engine: it runs rounds while there is work, and drains or ends when it is stopped or cannot go on."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable

from kvpress_eval.serve.metrics import log


class EngineThread(ABC):
    """Base class of an engine, in one of four states: running, draining, stopped, or lost after fatal errors.

    A subclass changes its requests under the condition `_changed`, and notifies it of new work.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._state = "running"
        self._thread = threading.Thread(target=self._run, name="kvpress-engine", daemon=True)
        self.on_lost: Callable[[], None] | None = None
        """Called in the engine's thread once the engine cannot go on."""

    # -- called by any thread ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread of the engine."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine accepts and runs requests."""
        return self._state == "running" and self._thread.is_alive()

    @property
    def is_lost(self) -> bool:
        """Whether the engine has ended because it could not go on."""
        return self._state == "lost"

    def stop(self, patience: float) -> None:
        """Accept no more requests, finish those accepted for at most `patience` seconds, then fail the others."""
        for state, seconds in (("draining", patience), ("stopped", None)):
            with self._changed:
                if not self._thread.is_alive():
                    return
                if self._state not in ("lost", "stopped"):
                    self._state = state
                self._changed.notify_all()
            self._thread.join(seconds)

    # -- defined by subclasses ---------------------------------------------------------------------------------

    @abstractmethod
    def _has_work(self) -> bool:
        """Return whether a request waits or runs."""

    @abstractmethod
    def _round(self) -> None:
        """Advance all requests."""

    @abstractmethod
    def _fail_round(self, error: BaseException) -> None:
        """End the requests of a round that raised an error outside of any request."""

    @abstractmethod
    def _note_failure(self, error: BaseException) -> None:
        """Record an error of the thread itself."""

    @abstractmethod
    def _is_fatal(self) -> bool:
        """Return whether the errors so far mean that the engine cannot go on."""

    @abstractmethod
    def _shut_down(self) -> None:
        """End all requests and free all memory."""

    # -- thread of the engine ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait():
                try:
                    self._round()
                except BaseException as error:  # panics of Rust libraries are no `Exception`
                    self._fail_round(error)
                if self._is_fatal():
                    break
        except BaseException as error:
            self._note_failure(error)
        with self._changed:
            is_lost = self._state == "running"  # else `stop` was called
            self._state = "lost" if is_lost else "stopped"
        try:
            self._shut_down()
        except BaseException as error:
            self._note_failure(error)
        if is_lost:
            log("lost", logging.ERROR)
            if self.on_lost is not None:
                self.on_lost()

    def _wait(self) -> bool:
        """Wait for work; return False once the engine must end."""
        with self._changed:
            while not self._has_work():
                if self._state != "running":
                    return False
                self._changed.wait()
            return self._state != "stopped"
