# SPDX-License-Identifier: Apache-2.0
"""A sender that is silent, or sends a few bytes now and then, runs into a deadline."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kvpress
from kvpress.hf.cache import incoming as incoming_module
from kvpress.hf.cache.incoming import STEP, Incoming
from tests.caches import prefill
from tests.models import tiny_model, tokens

SLOW = 0.3


def content_of(model: Any) -> bytes:
    stream = io.BytesIO()
    kvpress.send(prefill(model, kvpress.get_press("knorm:0.5"), tokens(2, 60)), stream, model)
    return stream.getvalue()


def sockets() -> tuple[Any, Callable[[bytes], None], Callable[[], None]]:
    ours, theirs = socket.socketpair()
    return ours, theirs.sendall, theirs.close


def pipes(buffering: int) -> tuple[Any, Callable[[bytes], None], Callable[[], None]]:
    read, write = os.pipe()
    file = os.fdopen(write, "wb", buffering=0)
    return os.fdopen(read, "rb", buffering=buffering), lambda data: file.write(data) and None, file.close


@pytest.fixture(params=["socket", "pipe", "buffered pipe"])
def stream(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Callable[[bytes], None], Callable[[], None]]]:
    ends = sockets() if request.param == "socket" else pipes(0 if request.param == "pipe" else -1)
    yield ends
    ends[2]()
    ends[0].close()


def drip(send: Callable[[bytes], None], content: bytes, done: threading.Event) -> threading.Thread:
    """Send five bytes at a time, in a thread."""

    def run() -> None:
        for at in range(0, len(content), 5):
            if done.wait(0.02):
                return
            send(content[at : at + 5])

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("sent", ["nothing", "length", "header"])
def test_a_silent_sender_is_given_up(sent: str, stream: Any) -> None:
    model, (ours, send, _) = tiny_model("llama"), stream
    content = content_of(model)
    header = 8 + int.from_bytes(content[:8], "little")
    send(content[: {"nothing": 0, "length": 8, "header": header}[sent]])
    begun = time.monotonic()
    name = "patience" if sent == "nothing" else "timeout"
    with pytest.raises(ConnectionError, match=rf"too few of the next within 0\.3 s \(`{name}`\)"):
        kvpress.receive(ours, model, timeout=SLOW, patience=SLOW)
    assert SLOW - 0.05 < time.monotonic() - begun < 10 * SLOW


@pytest.mark.parametrize("headers", [0, 1], ids=["header", "body"])
def test_a_sender_of_a_few_bytes_a_second_is_given_up(headers: int, stream: Any) -> None:
    model, (ours, send, _) = tiny_model("llama"), stream
    content, done = content_of(model), threading.Event()
    header = 8 + int.from_bytes(content[:8], "little")
    send(content[: headers * header])
    sender = drip(send, content[headers * header :], done)
    try:
        with pytest.raises(ConnectionError, match=r"the sender has sent [1-9][0-9]* bytes"):
            kvpress.receive(ours, model, timeout=SLOW)
    finally:
        done.set()
        sender.join()


def test_layers_that_do_not_come_end_a_pass(stream: Any) -> None:
    model, (ours, send, _) = tiny_model("llama"), stream
    content = content_of(model)
    send(
        content[: 8 + int.from_bytes(content[:8], "little") + 40]
    )  # the block that all layers share consists of a digest only
    cache = kvpress.receive(ours, model, timeout=SLOW, wait=False)
    with (
        pytest.raises(ConnectionError, match=r"layer 0 of the cache did not arrive.*`timeout`"),
        kvpress.reading(model, kvpress.get_press("knorm:0.5")),
    ):
        model(tokens(2, 1), past_key_values=cache)


def test_time_that_the_receiver_spends_does_not_count(stream: Any) -> None:
    ours, send, close = stream
    incoming = Incoming(ours, SLOW, SLOW)
    send(bytes(range(100)))
    view = memoryview(bytearray(50))
    incoming.fill(view)
    time.sleep(2 * SLOW)
    incoming.fill(view)
    assert bytes(view) == bytes(range(50, 100))
    close()
    with pytest.raises(ConnectionError, match="the sender has gone"):
        incoming.fill(view)


def test_a_sender_that_goes_on_is_waited_for(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each 64 KiB arrives within the timeout, all of them do not; on a clock of the test's own."""
    ours, send, _ = stream
    total, clock = 3 * STEP, [0.0]
    monkeypatch.setattr(incoming_module.time, "monotonic", lambda: clock[0])
    incoming = Incoming(ours, SLOW, None)
    incoming.begin_body()
    read = incoming._read

    def read_after_a_part(*args: Any) -> int | None:
        clock[0] += SLOW / 3
        send(bytes(STEP // 2))
        return read(*args)

    monkeypatch.setattr(incoming, "_read", read_after_a_part)
    incoming.fill(memoryview(bytearray(total)))
    assert incoming.received == total
    assert clock[0] > SLOW


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_times_are_above_zero(seconds: float) -> None:
    for name in ("timeout", "patience"):
        with pytest.raises(ValueError, match=f"{name} must be a number of seconds above 0"):
            kvpress.receive(io.BytesIO(), tiny_model("llama"), **{name: seconds})
    received = kvpress.receive(
        io.BytesIO(content_of(tiny_model("llama"))), tiny_model("llama"), timeout=None, patience=None
    )
    assert torch.equal(torch.tensor(received.get_seq_length()), torch.tensor(60))
