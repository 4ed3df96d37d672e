# SPDX-License-Identifier: Apache-2.0
"""One process compresses and another one generates: the tokens are the same, and a failed transfer leaves nothing."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.cache import container
from tests.caches import STORAGES, generate, positions, prefill
from tests.models import full_layers, padded_batch, tiny_model, tokens

FAMILIES = ["llama", "gemma3_text", "qwen3_next"]
PRESS = STORAGES["composed"]


def follow(model: Any, press: Any, cache: Any, steps: int = 6) -> Tensor:
    with kvpress.reading(model, press):
        return torch.cat([model(tokens(2, 1, t), past_key_values=cache).logits for t in range(steps)], dim=1)


def bytes_of(model: Any, cache: Any, **options: Any) -> bytes:
    """Return the bytes of a cache."""
    stream = io.BytesIO()
    assert kvpress.send(cache, stream, model, **options) == stream.tell()
    return stream.getvalue()


def prefill_elsewhere(pipe: socket.socket, family: str, spec: str) -> None:
    model, press = tiny_model(family), kvpress.get_press(spec)
    ids, mask = padded_batch([60, 37])
    kvpress.send(prefill(model, press, ids, mask), pipe, model, press, tokens=ids, mask=mask)


@pytest.mark.parametrize("wait", [True, False], ids=["whole", "at once"])
@pytest.mark.parametrize("spec", [PRESS, "none", "adakv(snapkv:0.5,window_size=4)"])
@pytest.mark.parametrize("family", FAMILIES)
def test_another_process_generates_from_a_received_cache(family: str, spec: str, wait: bool) -> None:
    model, press = tiny_model(family), kvpress.get_press(spec)
    ours, theirs = socket.socketpair()
    process = multiprocessing.get_context("fork").Process(target=prefill_elsewhere, args=(theirs, family, spec))
    process.start()
    theirs.close()
    cache = kvpress.receive(ours, model, wait=wait)
    ids, mask = padded_batch([60, 37])
    sequence = torch.cat([ids, tokens(2, 5, seed=9)], dim=1)
    full = torch.cat([mask, mask.new_ones(2, 5)], dim=1)
    outputs = []
    for source in (cache, prefill(model, press, ids, mask)):
        with kvpress.reading(model, press):
            outputs.append(generate(model, sequence, full, past_key_values=source, output_logits=True))
    process.join(timeout=60)
    assert process.exitcode == 0
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert all(map(torch.equal, outputs[0].logits, outputs[1].logits))
    assert ours.recv(1) == b""


@pytest.mark.parametrize("spec", STORAGES.values(), ids=STORAGES)
def test_transferred_bytes_are_held_bytes(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    cache = prefill(model, press, tokens(2, 400))
    before = copy.deepcopy(cache)
    content = bytes_of(model, cache, press=press)
    header = 8 + int.from_bytes(content[:8], "little")
    report = kvpress.memory_report(cache).total_bytes
    assert len(content) - header == pytest.approx(report, rel=0.01)
    received = kvpress.receive(io.BytesIO(content), model)
    assert kvpress.memory_report(received).total_bytes == pytest.approx(report, rel=0.01)
    assert torch.equal(follow(model, press, received), follow(model, press, before))
    assert torch.equal(follow(model, press, cache), follow(model, press, kvpress.receive(io.BytesIO(content), model)))


class Gated(io.RawIOBase):
    """Bytes of a cache as a stream: the first layer at once, the others through a gate, a few at a time."""

    def __init__(self, content: bytes, first: int) -> None:
        self.content, self.first, self.at = content, first, 0
        self.gate = threading.Event()

    def readinto(self, buffer: Any) -> int:
        if self.at >= self.first:
            assert self.gate.wait(timeout=20)
        end = self.first if self.at < self.first else len(self.content)
        count = min(len(buffer), 1000, end - self.at)
        buffer[:count] = self.content[self.at : self.at + count]
        self.at += count
        return count


def end_of_layer(content: bytes, index: int = 0) -> int:
    """Return the number of bytes up to the end of a layer."""
    header = container.receive_header(io.BytesIO(content).readinto, None)
    return 8 + int.from_bytes(content[:8], "little") + header.blocks[index + 1][2] + (index + 2) * container.DIGEST


@contextmanager
def noticed(module: Any, event: threading.Event) -> Iterator[None]:
    handle = module.register_forward_hook(lambda *_: event.set())
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_read_while_others_are_on_their_way(family: str) -> None:
    model, press = tiny_model(family), kvpress.get_press(PRESS)
    cache = prefill(model, press, tokens(2, 60))
    content = bytes_of(model, cache)
    first = full_layers(model)[0]  # a reader of a cache begins with this layer
    stream = Gated(content, end_of_layer(content, first))
    received = kvpress.receive(stream, model, wait=False)
    with noticed(model.model.layers[first], stream.gate):  # or the transfer never goes on
        logits = follow(model, press, received)
    assert torch.equal(logits, follow(model, press, cache))
    assert [type(loaded) for loaded in received.layers] == [type(loaded) for loaded in cache.layers]
    assert all("_transfer" not in vars(layer) for layer in received.layers)


def test_a_cache_on_its_way_is_copied_and_measured_once_it_is_there() -> None:
    model, press = tiny_model("gemma3_text"), kvpress.get_press(PRESS)
    cache = prefill(model, press, tokens(2, 60))
    content = bytes_of(model, cache)
    for look in (copy.deepcopy, kvpress.memory_report, positions):
        stream = Gated(content, end_of_layer(content))
        received = kvpress.receive(stream, model, wait=False)
        threading.Timer(0.05, stream.gate.set).start()
        look(received)
        assert positions(received) == positions(cache)
    assert torch.equal(follow(model, press, copy.deepcopy(received)), follow(model, press, cache))


def test_a_transfer_that_is_aborted_leaves_nothing_at_the_receiver() -> None:
    model, press = tiny_model("llama"), kvpress.get_press(PRESS)
    content = bytes_of(model, prefill(model, press, tokens(2, 60)))
    for length in (0, 4, 2000, end_of_layer(content), len(content) - 1):
        with pytest.raises(ConnectionError, match="the sender has gone before all of it was sent"):
            kvpress.receive(io.BytesIO(content[:length]), model)
    cut = io.BytesIO(content[: end_of_layer(content) + 100])
    received = kvpress.receive(cut, model, wait=False)
    with pytest.raises(ConnectionError, match=r"layer 1 of the cache did not arrive: .*the sender has gone"):
        follow(model, kvpress.get_press(PRESS), received)  # this press remembers its last cache
    gone = weakref.ref(received.layers[0].store)
    del received
    gc.collect()
    assert gone() is None
    assert not [thread for thread in threading.enumerate() if thread.name == "kvpress-receive"]
    # The model is as before.
    complete = kvpress.receive(io.BytesIO(content), model)
    assert torch.equal(follow(model, press, complete), follow(model, press, prefill(model, press, tokens(2, 60))))


def test_a_receiver_that_goes_leaves_the_sender_as_it_was() -> None:
    model, press = tiny_model("llama"), kvpress.get_press("none")
    cache = prefill(model, press, tokens(2, 200))
    twin = copy.deepcopy(cache)
    ours, theirs = socket.socketpair()
    theirs.close()
    with pytest.raises(ConnectionError, match="was not sent, since the receiver has gone"):
        kvpress.send(cache, ours, model)
    ours.close()
    read, write = os.pipe()
    os.close(read)
    with pytest.raises(ConnectionError, match="was not sent"), os.fdopen(write, "wb", buffering=0) as pipe:
        kvpress.send(cache, pipe, model)
    assert torch.equal(follow(model, press, cache), follow(model, press, twin))


def test_only_a_valid_cache_of_this_model_is_admitted() -> None:
    model, press = tiny_model("llama"), kvpress.get_press(PRESS)
    content = bytes_of(model, prefill(model, press, tokens(2, 60)))
    size = len(content) - 8 - int.from_bytes(content[:8], "little")
    for limit in ("10kB", size - 200):
        stream = io.BytesIO(content)
        with pytest.raises(ValueError, match="are admitted"):
            kvpress.receive(stream, model, limit=limit)
        assert stream.tell() <= len(content) - size
    kvpress.receive(io.BytesIO(content), model, limit=size)
    with pytest.raises(ValueError, match=r"the cache that was sent was made by .* weights"):
        kvpress.receive(io.BytesIO(content), tiny_model("llama", seed=1))
    with pytest.raises(ValueError, match="no header of safetensors"):
        kvpress.receive(io.BytesIO(b"GET / HTTP/1.1\r\n" * 10), model)
    damaged = bytearray(content)
    damaged[-100] ^= 1
    with pytest.raises(ValueError, match="damaged on its way"):
        kvpress.receive(io.BytesIO(bytes(damaged)), model)
    with pytest.raises(TypeError, match="has a method `write`, got str"):
        kvpress.send(prefill(model, press, tokens(2, 60)), "file", model)
    with pytest.raises(TypeError, match="has a method `readinto`, got str"):
        kvpress.receive("file", model)
    with pytest.raises(ValueError, match="the cache is empty"):
        kvpress.send(DynamicCache(config=model.config), io.BytesIO(), model)


def test_several_caches_go_through_one_stream() -> None:
    model, stream = tiny_model("llama"), io.BytesIO()
    caches = [prefill(model, kvpress.get_press(spec), tokens(2, 60)) for spec in (PRESS, "knorm:0.5")]
    for cache in caches:
        kvpress.send(cache, stream, model)
    stream.seek(0)
    assert [positions(kvpress.receive(stream, model)) for _ in caches] == [positions(cache) for cache in caches]
    with pytest.raises(ConnectionError):
        kvpress.receive(stream, model)
