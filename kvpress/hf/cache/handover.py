# SPDX-License-Identifier: Apache-2.0
"""Send caches to another process: one reads and compresses, the other generates, after Zhong et al., DistServe, 2024.

A stream has the format of `kvpress.save`, layer by layer, so that the first layers can be read before the last arrive. Sending
and receiving need only a few megabytes besides the cache.
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
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvpress.cache.container import Tensors, receive_block, receive_header, send_blocks
from kvpress.cache.files import check_names
from kvpress.cache.header import Header, Place
from kvpress.cache.report import parse_bytes
from kvpress.core.press import BasePress
from kvpress.hf.cache.adoption import ADOPTED
from kvpress.hf.cache.cache_loader import Arriving, readable
from kvpress.hf.cache.files import as_it_is, written
from kvpress.hf.cache.incoming import Incoming
from kvpress.hf.cache.info import check_description
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
    tokenizer: PreTrainedTokenizerBase | None = None,
    notes: dict[str, Any] | None = None,
) -> int:
    """Send a cache through a socket, a pipe or another writable stream; returns the number of bytes sent.

    The cache does not change, and the stream is not closed, so several caches may be sent through it. The other arguments are
    recorded as by `kvpress.save`.

    Raises:
        ConnectionError: the receiver has closed the stream.
        TypeError, ValueError: as for `kvpress.save`, before any byte is sent.
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
    tokenizer: PreTrainedTokenizerBase | None = None,
    limit: int | str | None = None,
    wait: bool = True,
    timeout: float | None = 60.0,
    patience: float | None = 3600.0,
) -> DynamicCache:
    """Receive a cache from `send`, on the device of the model.

    With `wait=False`, layers arrive while the cache is used: a read of a missing layer waits for it.

    Args:
        stream: a socket, a pipe or another readable stream, in blocking mode; it is not closed.
        model: the model that made the cache; another one is refused before any pairs are read.
        tokenizer: compared with the tokenizer of `send`, if it had one.
        limit: bytes of a cache in memory, or a size such as "4GB"; a larger one is refused before any pairs are read.
        wait: False returns the cache once its header has arrived. A pass that reads a layer that never arrives raises
            ConnectionError.
        timeout: seconds for the header after its first byte, and for each 64 KiB after it; None for no limit. Applies to
            sockets and pipes; a read of another stream is not interrupted.
        patience: seconds until the first byte, while the sender may still read the prompt; None for no limit.

    Raises:
        ConnectionError: the sender closed the stream early, or sends too slowly.
        ValueError: the data are not a cache, damaged, too large or of another model. The stream may have unread data and cannot
            be used further.
    """
    max_bytes = parse_bytes(limit) if isinstance(limit, str) else limit
    incoming = Incoming(stream, timeout, patience)
    header = receive_header(incoming.fill, max_bytes)
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
    """Transfer of a cache: `arrived[i]` is set once layer i is received, or after a failure, stored in `error`."""

    def __init__(self, header: Header, model: PreTrainedModel, fill: Callable[[memoryview], None]) -> None:
        self.header, self.fill = header, fill
        self.layers = len(header.about["layers"])
        self.arrived = [threading.Event() for _ in range(self.layers)]
        self.error: Exception | None = None
        self._bytes = receive_block(header, 0, fill)
        self.arriving = Arriving(header, Tensors(header, self._read), model)
        for index in range(self.layers):
            layer = object.__new__(_waiting(self.arriving.kind(index)))
            description = header.about["layers"][index]
            plain = self._plain(index)
            vars(layer).update(plain, _transfer=(self, index), _seen=description["seen"], _stored=description["stored"])
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
        except Exception as error:  # raised again in the threads that wait for a layer
            self.error = error
        finally:
            self._bytes = {}
            for event in self.arrived:
                event.set()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Transfer:
        """Return the transfer itself: copies of its layers wait for the same data."""
        return self

    def wait(self, index: int) -> None:
        """Wait for a layer.

        Raises:
            ConnectionError: the transfer failed before the layer.
        """
        self.arrived[index].wait()
        if "_transfer" in vars(self.arriving.cache.layers[index]):
            raise ConnectionError(f"layer {index} of the cache did not arrive: {self.error}") from self.error

    def _read(self, place: Place) -> Tensor:
        return self._bytes.pop(place.start) if place.start < place.end else torch.empty(0, dtype=torch.uint8)

    def _plain(self, index: int) -> dict[str, Any]:
        """Return the numbers, strings and booleans of a layer, which are known before its tensors arrive."""
        with readable(f"layer {index} of the cache"):
            state = self.header.about["layers"][index]["state"]["dict"]
            values = {str(name): value for name, value in state if isinstance(value, (bool, int, float, str))}
            check_names(self.arriving.kind(index), values)
        return {**values, "interrupted": None} if issubclass(self.arriving.kind(index), PressLayer) else values


@memoised
def _waiting(kind: type[Any]) -> type[Any]:
    """Return the class of layers of a kind before they arrive.

    Access to an attribute that is not known yet waits for the layer, which then has its final class. The class has a single
    base, so that both have the same memory layout.
    """
    members: dict[str, Any] = {"on_its_way": True, "__getattr__": _awaited, "__deepcopy__": _copied}
    if issubclass(kind, PressLayer):
        members |= {"get_seq_length": lambda layer: layer._seen, "get_mask_sizes": _mask_sizes}
    waiting: type[Any] = types.new_class(
        f"Waiting{kind.__name__}", (kind,), exec_body=lambda body: body.update(members)
    )
    return waiting


def _mask_sizes(layer: Any, query_length: int) -> tuple[int, int]:
    """Return the mask sizes of a layer from the numbers in the header."""
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
            written_bytes = stream.write(view)
            view = view[len(view) if written_bytes is None else written_bytes :]

    return write
