# SPDX-License-Identifier: Apache-2.0
"""Caches that go to another process: one reads and compresses, the other generates, after Zhong et al., DistServe, 2024.

What goes through a stream is the file of `kvpress.save`, layer by layer, so that the first layers can be read while others are
on their way. Of what is sent or received, only a few megabytes are held beside the cache itself.
"""

from __future__ import annotations

import copy
import socket
import threading
import types
from collections.abc import Callable
from functools import cache as memoised
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_utils import PreTrainedModel

from kvpress.cache.container import Header, Place, Tensors, receive_block, receive_header, send_blocks
from kvpress.cache.files import check_names
from kvpress.cache.report import parse_bytes
from kvpress.core.press import BasePress
from kvpress.hf.cache.adoption import ADOPTED
from kvpress.hf.cache.cache_loader import Arriving, check_description, readable
from kvpress.hf.cache.files import as_it_is, written
from kvpress.hf.cache.incoming import Incoming
from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.fingerprint import check_model, check_tokenizer


def send(
    cache: Cache,
    stream: Any,
    model: PreTrainedModel,
    press: BasePress | str | None = None,
    *,
    tokens: Tensor | None = None,
    mask: Tensor | None = None,
    tokenizer: Any = None,
    notes: dict[str, Any] | None = None,
) -> int:
    """Send a cache through a socket, a pipe or anything that is written to; returns the bytes that it took.

    The cache stays as it is, whatever happens to the stream, which is not closed; several caches may go through one. What is
    given beside it is noted as by `kvpress.save`.

    Raises:
        ConnectionError: whoever receives has gone.
        TypeError, ValueError: as for `kvpress.save`, before anything is sent.
    """
    write = _writer(stream)
    with as_it_is(cache):
        writing = written(cache, model, press, tokens=tokens, mask=mask, tokenizer=tokenizer, notes=notes)
        try:
            sent = send_blocks(writing, write)
            if hasattr(stream, "flush"):
                stream.flush()
        except OSError as error:
            raise ConnectionError(f"the cache was not sent, since the receiver has gone: {error}") from error
    return sent


def receive(
    stream: Any,
    model: PreTrainedModel,
    *,
    tokenizer: Any = None,
    limit: int | str | None = None,
    wait: bool = True,
    timeout: float | None = 60.0,
    patience: float | None = 3600.0,
) -> DynamicCache:
    """Return a cache that `send` sends, on the device of the model.

    Without `wait`, its layers arrive while it is used: what reads a layer that is not there yet waits for it.

    Args:
        stream: a socket, a pipe or anything that is read from, in blocking mode; it is not closed.
        model: the model that the cache was made by; another one is refused before any pairs are read.
        tokenizer: compared with the one that `send` was given, where it was.
        limit: bytes of a cache in memory, or a size such as "4GB"; a larger one is refused before any pairs are read.
        wait: without it, the cache is returned as soon as it is known what will come; a pass that reaches a layer which does
            not come ends in a ConnectionError.
        timeout: seconds in which, once the first byte is there, the header must come, and then each 64 KiB; None for any time.
            Sockets and pipes are waited for so long; of another stream, a read that has begun is not broken off.
        patience: seconds until the first byte, which the sender may need to read a prompt; None for any time.

    Raises:
        ConnectionError: the sender has gone before all was sent, or sends too slowly.
        ValueError: what comes is no cache, damaged, too large or of another model. Nothing is left of it; the stream may hold
            more of it and is of no further use.
    """
    most = parse_bytes(limit) if isinstance(limit, str) else limit
    incoming = Incoming(stream, timeout, patience)
    header = receive_header(incoming.fill, most)
    check_description(header, "the cache that was sent")
    check_model(header.about, model, "the cache that was sent")
    check_tokenizer(header.about, tokenizer, "the cache that was sent")
    incoming.begin_body()
    transfer = _Transfer(header, model, incoming.fill)
    if wait or any(transfer.arriving.kind(index) in ADOPTED for index in range(transfer.layers)):
        transfer.run()
        if transfer.error is not None:
            raise transfer.error
    else:
        threading.Thread(target=transfer.run, name="kvpress-receive", daemon=True).start()
    return transfer.arriving.cache


class _Transfer:
    """A cache on its way; `arrived[i]` is set once layer i is there, or `error` says why it will not be."""

    def __init__(self, header: Header, model: PreTrainedModel, fill: Callable[[memoryview], None]) -> None:
        self.header, self.fill = header, fill
        self.layers = len(header.about["layers"])
        self.arrived = [threading.Event() for _ in range(self.layers)]
        self.error: Exception | None = None
        self._bytes = receive_block(header, 0, fill)
        self.arriving = Arriving(header, Tensors(header, self._read), model)
        for index in range(self.layers):
            layer = object.__new__(_waiting(self.arriving.kind(index)))
            said = header.about["layers"][index]
            known = self._plain(index)
            vars(layer).update(known, _transfer=(self, index), _seen=said["seen"], _stored=said["stored"])
            self.arriving.cache.layers[index] = layer

    def run(self) -> None:
        """Receive all layers, in this thread."""
        try:
            for index in range(self.layers):
                self._bytes = receive_block(self.header, index + 1, self.fill)
                layer = self.arriving.cache.layers[index]
                self.arriving.take(index)
                for name in ("_seen", "_stored", "_transfer"):
                    delattr(layer, name)
                self.arrived[index].set()
        except Exception as error:  # whoever waits is told
            self.error = error
        finally:
            self._bytes = {}
            for event in self.arrived:
                event.set()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Transfer:
        """Layers that are copied while they arrive are copied once they are there; the transfer is one."""
        return self

    def wait(self, index: int) -> None:
        """Wait for a layer.

        Raises:
            ConnectionError: it will not come.
        """
        self.arrived[index].wait()
        if "_transfer" in vars(self.arriving.cache.layers[index]):
            raise ConnectionError(f"layer {index} of the cache did not arrive: {self.error}") from self.error

    def _read(self, place: Place) -> Tensor:
        return self._bytes.pop(place.start) if place.start < place.end else torch.empty(0, dtype=torch.uint8)

    def _plain(self, index: int) -> dict[str, Any]:
        """Return what is known of a layer before its tensors are there: numbers and switches."""
        with readable(f"layer {index} of the cache"):
            held = self.header.about["layers"][index]["state"]["dict"]
            known = {str(name): value for name, value in held if isinstance(value, (bool, int, float, str))}
            check_names(self.arriving.kind(index), known)
        return {**known, "interrupted": None} if issubclass(self.arriving.kind(index), PressLayer) else known


@memoised
def _waiting(kind: type[Any]) -> type[Any]:
    """Return the class of layers of a kind that are on their way.

    Who asks such a layer for what is not known of it yet waits; it has become one of its own class by then. (A class with a
    second base would not have its layout.)
    """
    given: dict[str, Any] = {"on_its_way": True, "__getattr__": _awaited, "__deepcopy__": _copied}
    if issubclass(kind, PressLayer):
        given |= {"get_seq_length": lambda layer: layer._seen, "get_mask_sizes": _mask_sizes}
    waiting: type[Any] = types.new_class(f"Waiting{kind.__name__}", (kind,), exec_body=lambda body: body.update(given))
    return waiting


def _mask_sizes(layer: Any, query_length: int) -> tuple[int, int]:
    """Return what the layer will, from the numbers of pairs that the header gives."""
    if layer.columns:
        return int(layer._seen) + query_length, 0
    return int(layer._stored) + query_length, int(layer._seen - layer._stored)


def _awaited(layer: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"{type(layer).__name__!r} object has no attribute {name!r}")
    _arrive(layer)
    return object.__getattribute__(layer, name)


def _copied(layer: Any, memo: dict[int, Any]) -> Any:
    _arrive(layer)
    return copy.deepcopy(layer, memo)


def _arrive(layer: Any) -> None:
    transfer, index = vars(layer).get("_transfer", (None, 0))
    if transfer is not None:
        transfer.wait(index)


def _writer(stream: Any) -> Callable[[memoryview], None]:
    if isinstance(stream, socket.socket):
        return stream.sendall
    if not hasattr(stream, "write"):
        raise TypeError(f"a cache is sent through a socket or what has a method `write`, got {type(stream).__name__}")

    def write(view: memoryview) -> None:
        while len(view):
            taken = stream.write(view)
            view = view[len(view) if taken is None else taken :]

    return write
