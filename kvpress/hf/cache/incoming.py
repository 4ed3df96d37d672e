# SPDX-License-Identifier: Apache-2.0
"""Read from a stream with timeouts."""

from __future__ import annotations

import io
import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

STEP = 2**16
"""Bytes of a body that must arrive within each `timeout`."""


class Incoming:
    """Reader of a stream with timeouts.

    The first byte must arrive within `patience` seconds, the rest of the header within `timeout`, and after `begin_body` each
    64 KiB within `timeout`. None is no limit. Time between the calls does not count. Timeouts apply to sockets and pipes; a
    read of another stream is not interrupted.
    """

    def __init__(self, stream: Any, timeout: float | None, patience: float | None) -> None:
        for name, seconds in (("timeout", timeout), ("patience", patience)):
            if seconds is not None and not seconds > 0:
                raise ValueError(f"{name} must be a number of seconds above 0, or None for no bound; got {seconds!r}")
        self._read = _reader(stream)
        self._timeout, self._name, self._limit = timeout, "patience", patience
        self._left, self._pending, self.received = patience, 0, 0
        self._selector: selectors.BaseSelector | None = None
        if (descriptor := _descriptor(stream)) is not None:
            self._selector = getattr(selectors, "PollSelector", selectors.SelectSelector)()
            self._selector.register(descriptor, selectors.EVENT_READ)

    def begin_body(self) -> None:
        """Restart the timeout for each further 64 KiB."""
        self._renew()
        self._pending = STEP

    def fill(self, view: memoryview) -> None:
        """Fill a view with bytes.

        Raises:
            ConnectionError: the sender has closed the stream, or was too slow.
        """
        received = 0
        while received < len(view):
            started = time.monotonic()
            try:
                count = self._read(view[received:], self._left, self._selector)
            except TimeoutError:
                count = None
            except OSError as error:
                raise ConnectionError(f"the cache was not received: {error}") from error
            if count == 0:
                raise ConnectionError("the cache was not received: the sender has gone before all of it was sent")
            received += count or 0
            self._count(count or 0, time.monotonic() - started)

    def _count(self, count: int, waited: float) -> None:
        first, self.received = self.received == 0, self.received + count
        if self._left is not None:
            self._left -= waited
        if first and count:
            self._renew()
        elif self._pending and count:
            self._pending -= count
            if self._pending <= 0:
                self.begin_body()
        if self._left is not None and self._left <= 0:
            raise ConnectionError(
                f"the cache was not received: the sender has sent {self.received} bytes, and too few of the next within "
                f"{self._limit:g} s (`{self._name}`)"
            )

    def _renew(self) -> None:
        self._name, self._limit, self._left = "timeout", self._timeout, self._timeout


Read = Callable[[memoryview, float | None, "selectors.BaseSelector | None"], int | None]
"""Function that reads into a view within a time; returns the bytes read, 0 at the end of the stream, None at timeout."""


def _reader(stream: Any) -> Read:
    if isinstance(stream, socket.socket):
        return _within(stream) if hasattr(stream, "pending") else _waiting(stream.recv_into)
    if not hasattr(stream, "readinto"):
        raise TypeError(f"a cache comes through a socket or what has a method `readinto`, got {type(stream).__name__}")
    if isinstance(stream, io.BufferedReader) and _descriptor(stream) is not None:
        return _buffered(stream)
    return _waiting(stream.readinto)


def _waiting(into: Callable[[memoryview], int | None]) -> Read:
    """Return a read that waits until data are available."""

    def read(view: memoryview, seconds: float | None, selector: selectors.BaseSelector | None) -> int | None:
        if selector is not None and not selector.select(seconds):
            return None
        return into(view)

    return read


def _within(stream: socket.socket) -> Read:
    """Return a read of an encrypted socket, which may be readable before a whole record has arrived."""

    def read(view: memoryview, seconds: float | None, selector: selectors.BaseSelector | None) -> int | None:
        del selector
        before = stream.gettimeout()
        stream.settimeout(seconds)
        try:
            return stream.recv_into(view)
        finally:
            stream.settimeout(before)

    return read


def _buffered(stream: io.BufferedReader) -> Read:
    """Return a read of a buffered pipe, whose buffer can only be checked by a read."""

    def read(view: memoryview, seconds: float | None, selector: selectors.BaseSelector | None) -> int | None:
        descriptor = stream.fileno()
        blocking = os.get_blocking(descriptor)
        os.set_blocking(descriptor, False)
        try:
            count = stream.readinto1(view)
        except BlockingIOError:
            count = None
        finally:
            os.set_blocking(descriptor, blocking)
        if count is None and selector is not None:
            selector.select(seconds)
        return count

    return read


def _descriptor(stream: Any) -> int | None:
    """Return the file descriptor of a socket, or on POSIX of a pipe; None for other streams."""
    if isinstance(stream, socket.socket):
        return stream.fileno()
    if os.name != "posix" or not isinstance(stream, (io.FileIO, io.BufferedReader)):
        return None
    try:
        return stream.fileno()
    except OSError:
        return None
