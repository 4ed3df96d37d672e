# SPDX-License-Identifier: Apache-2.0
"""Checks of a store from a file: lengths and types are consistent, so that no kernel reads out of bounds.

Each check takes time and memory in proportion to the header of the file, not to the numbers in it.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import torch
from torch import Tensor

from kvpress.cache.layout import Layout
from kvpress.cache.segment import Segment
from kvpress.cache.storage import is_of
from kvpress.cache.store import KVStore
from kvpress.cache.window import Window
from kvpress.kernels import Dense, Packed

COUNTERS = ("batch", "heads", "seen", "counted", "fixed_at")
"""Attributes of a store that count rows, heads or tokens."""


def check_store(store: Any, length: int) -> None:
    """Check a store that has seen `length` tokens.

    Raises:
        ValueError: an attribute is missing, has a wrong type, or a length that contradicts others.
    """
    if not isinstance(store, KVStore):
        raise ValueError(f"the store is a {type(store).__name__}")
    window = getattr(store, "window", None)
    if not isinstance(window, Window):
        raise ValueError("the store has no window")
    _check_names(store, KVStore(torch.empty(1, 1, 0, 1), torch.empty(1, 1, 0, 1)))
    _check_names(window, Window(torch.empty(1, 1, 0, 1), torch.empty(1, 1, 0, 1)))
    for name in COUNTERS:
        if type(value := getattr(store, name)) is not int or not 0 <= value <= max(length, 2**31):
            raise ValueError(f"{name} is {value!r}")
    _check_window(store, window, length)
    streams = store.batch * store.heads
    for segment in _segments(store):
        segment.check(segment.layout.total, streams)
        if any(count > length for count in segment.layout.lengths) or any(
            abs(first) > length for first in segment.first
        ):
            raise ValueError(f"a segment holds more pairs than the {length} tokens that were read")
        _check_pairs(segment, store)
        _check_index(segment.index, streams, length, segment.layout.total)
    if any(count > length for count in store.stored()):
        raise ValueError(f"a stream holds more pairs than the {length} tokens that were read")
    _check_index(store.index, streams, length)
    _check_rows(store)


def _check_names(value: Any, like: Any) -> None:
    """Check that an object has the attributes of `like`, and no others except annotated ones."""
    names, usual = set(vars(value)), set(vars(like))
    if wrong := (usual - names) | (names - usual - set(type(like).__annotations__)):
        raise ValueError(f"attributes of {type(like).__name__} differ in {', '.join(sorted(wrong))}")


def _check_window(store: KVStore, window: Window, length: int) -> None:
    for name in ("keys", "values"):
        array = getattr(window, name)
        if not isinstance(array, Tensor) or array.dim() != 4 or array.dtype != store.dtype:
            raise ValueError(f"{name} of the window are no tensor [B, H, n, D] of the dtype {store.dtype}")
        if array.shape[:3] != (store.batch, store.heads, window.length):
            raise ValueError(
                f"{name} of the window have shape {list(array.shape)}, not {store.batch} rows of {store.heads} heads of "
                f"{window.length} tokens"
            )
    if type(window.first) is not int or store.seen != length or window.first + window.length != length:
        raise ValueError(f"the window of {window.length} tokens from {window.first} does not end at {length} tokens")
    sides = {**window.side, "log_weight": window.log_weight}
    for name, side in sides.items():
        if side is not None and (not isinstance(side, Tensor) or side.shape != window.keys.shape[:3]):
            raise ValueError(f"{name!r} of the window is not one number for each of its tokens")
    if window.cursor is not None or store.journal is not None:
        raise ValueError("the window has a cursor, or the store a journal, which files never contain")


def _segments(store: KVStore) -> list[Segment]:
    segments = [*store.segments, *([] if vars(store)["dense"] is None else [vars(store)["dense"]])]
    for segment in segments:
        if not isinstance(segment, Segment):
            raise ValueError(f"a segment is a {type(segment).__name__}")
    return segments


def _check_pairs(segment: Segment, store: KVStore) -> None:
    """Check that the first and the last pair can be read, with the shape of the window's pairs."""
    if not segment.layout.total:
        return
    rows = torch.tensor([0, segment.layout.total - 1])
    for name, pairs, like in zip(("keys", "values"), segment.read(rows), _window_pairs(store), strict=True):
        if pairs.dtype != like.dtype or pairs.shape != (2, like.shape[3]):
            raise ValueError(f"{name} of {type(segment).__name__} are read as {pairs.dtype} {list(pairs.shape)}")


def _window_pairs(store: KVStore) -> tuple[Tensor, Tensor]:
    return store.window.keys, store.window.values


def _check_rows(store: KVStore) -> None:
    """Check the attributes of a store with an entry for every row."""
    for name in ("targets", "since_eviction", *(() if store.sealed_tokens is None else ("sealed_tokens",))):
        numbers = getattr(store, name)
        if not isinstance(numbers, list) or len(numbers) != store.batch:
            raise ValueError(f"{name} are {numbers!r}, not one number for each of {store.batch} rows")
        if not _are_ints([0 if number is None and name == "targets" else number for number in numbers]):
            raise ValueError(f"{name} are {numbers!r}, which are no integers")
    if not _are_ints(store.settled) or not all(
        isinstance(state, dict) for state in (store.observers, store.codec_state)
    ):
        raise ValueError("observers or the state of codecs are of another type")
    for request, observer in store.observers.items():
        _check_observer(observer, request.make(), store.batch)


def _check_observer(observer: Any, new: Any, batch: int) -> None:
    """Check that an observer has the attribute types of a `new` one, and tensors of `batch` rows."""
    kind = type(new).__name__
    if type(observer) is not type(new) or observer.sides != new.sides:
        raise ValueError(f"an observer is not a {kind} of {new.sides}")
    for name, usual in vars(new).items():
        value = getattr(observer, name)
        number = type(usual) is int and type(value) is float  # a sum that began at 0
        if isinstance(usual, (bool, int, float, str, tuple)) and type(value) is not type(usual) and not number:
            raise ValueError(f"{name} of {kind} is a {type(value).__name__}, not a {type(usual).__name__}")
    for name in new.state_names:
        tensor = getattr(observer, name)
        if tensor is not None and (not isinstance(tensor, Tensor) or tensor.shape[:1] != (batch,)):
            raise ValueError(f"{name} of {kind} is not one entry for each of {batch} rows")


def _check_index(index: Any, streams: int, length: int, total: int | None = None) -> None:
    """Check the indexes of selectors, over all pairs or over the `total` pairs of a segment."""
    if not isinstance(index, dict):
        raise ValueError(f"an index is a {type(index).__name__}")
    for value in index.values():
        if is_dataclass(value):
            _check_entry(value, streams, length, total)


def _check_entry(value: Any, streams: int, length: int, total: int | None) -> None:
    kind, declared = type(value), [field.name for field in fields(value)]
    hints = get_type_hints(kind)
    for name in declared:
        if name not in vars(value) or not is_of(field_value := vars(value)[name], hints[name]):
            raise ValueError(f"{name} of {kind.__name__} is missing or not {hints[name]}")
        if isinstance(field_value, Layout):
            if field_value.streams != streams or min(field_value.lengths) < 0 or field_value.longest > length:
                raise ValueError(
                    f"{name} of {kind.__name__} is not a layout of {streams} streams of at most {length} tokens"
                )
            if name == "layout":
                total = field_value.total
        elif isinstance(field_value, (Dense, Packed)):
            _check_entry(field_value, streams, length, None)
            field_value.check(name, field_value.storage.shape[0] if total is None else total)
    tensors = [vars(value)[name] for name in declared if isinstance(vars(value)[name], Tensor)]
    if total is not None and any(tensor.shape[:1] != (total,) for tensor in tensors[:1]):
        raise ValueError(f"{kind.__name__} does not have {total} entries")
    if isinstance(vars(value).get("layout"), Layout) and any(tensor.shape != tensors[0].shape for tensor in tensors):
        raise ValueError(f"tensors of {kind.__name__} have different shapes")


def _are_ints(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)
