# SPDX-License-Identifier: Apache-2.0
"""Bytes that come through a stream, with bounds on the time that is spent waiting for them."""

from __future__ import annotations

import io
import os
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

STEP = 2**16
"""Bytes of a body that must come within each `timeout`; less may come at its end."""


class Incoming:
    """Reads from a stream: `fill(view)` reads as many bytes as a view has.

    Waiting for the first byte takes at most `patience` seconds, and for all further ones of the header `timeout` in all. Once
    `begin_body` was called, each 64 KiB may be waited for so long. None is any time. Time that the caller spends does not
    count. Sockets and the descriptors of pipes are waited for; of another stream, a read that has begun is not broken off.
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
        """Wait for each further 64 KiB anew."""
        self._renew()
        self._pending = STEP

    def fill(self, view: memoryview) -> None:
        """Read as many bytes as a view has.

        Raises:
            ConnectionError: the sender has gone, or did not send so much in time.
        """
        got = 0
        while got < len(view):
            begun = time.monotonic()
            try:
                count = self._read(view[got:], self._left, self._selector)
            except TimeoutError:
                count = None
            except OSError as error:
                raise ConnectionError(f"the cache was not received: {error}") from error
            if count == 0:
                raise ConnectionError("the cache was not received: the sender has gone before all of it was sent")
            got += count or 0
            self._count(count or 0, time.monotonic() - begun)

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
"""Reads some bytes into a view within a time; returns how many, 0 at the end of the stream, None where none came."""


def _reader(stream: Any) -> Read:
    if isinstance(stream, socket.socket):
        return _within(stream) if hasattr(stream, "pending") else _waiting(stream.recv_into)
    if not hasattr(stream, "readinto"):
        raise TypeError(f"a cache comes through a socket or what has a method `readinto`, got {type(stream).__name__}")
    if isinstance(stream, io.BufferedReader) and _descriptor(stream) is not None:
        return _buffered(stream)
    return _waiting(stream.readinto)


def _waiting(into: Callable[[memoryview], int | None]) -> Read:
    """Return a read that begins once there is something to be read."""

    def read(view: memoryview, seconds: float | None, selector: selectors.BaseSelector | None) -> int | None:
        if selector is not None and not selector.select(seconds):
            return None
        return into(view)

    return read


def _within(stream: socket.socket) -> Read:
    """Return a read of an encrypted socket, whose records may be incomplete when something can be read."""

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
    """Return a read of a pipe with a buffer, of which nobody can learn whether it is empty without a read."""

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
    """Return what can be waited for: a socket, or on POSIX the descriptor of a pipe; None for other streams."""
    if isinstance(stream, socket.socket):
        return stream.fileno()
    if os.name != "posix" or not isinstance(stream, (io.FileIO, io.BufferedReader)):
        return None
    try:
        return stream.fileno()
    except OSError:
        return None
