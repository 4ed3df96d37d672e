# SPDX-License-Identifier: Apache-2.0
"""Serialisation of caches to named tensors and plain data, for files and transfers.

Only a closed set of types is serialised, so that reading a file runs no code from it: plain data, tensors, containers of both,
storage formats (`kvpress.cache.storage`), and objects of the classes in `kept_whole`. Objects that layers share, such as a
table, are written once and shared again after reading.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvpress.cache.layout import Layout
from kvpress.cache.storage import Held
from kvpress.cache.store import KVStore
from kvpress.cache.tier import FileTier
from kvpress.cache.window import Window
from kvpress.kernels import Dense, Packed

ClassT = TypeVar("ClassT", bound=type)

kept_whole: dict[str, type] = {}
"""Classes by name whose objects are serialised by their attributes, or by the result of their method `written`."""


def keep_whole(kind: ClassT) -> ClassT:
    """Register a class for serialisation; its attributes must have serialisable types.

    Raises:
        TypeError: another class of kvpress has this name, which identifies it in files.
    """
    registered = kept_whole.get(kind.__name__)
    both_ours = registered is not None and all(cls.__module__.startswith("kvpress.") for cls in (registered, kind))
    if registered is not None and both_ours and registered.__module__ != kind.__module__:
        raise TypeError(
            f"{kind.__module__} and {registered.__module__} both define {kind.__name__}, and files identify classes by name"
        )
    kept_whole[kind.__name__] = kind
    return kind


for _kind in (KVStore, Window, Dense, Packed, FileTier):
    keep_whole(_kind)


class Packer:
    """Serialises objects; collects their tensors in `tensors` by name, each once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._numbers: dict[int, int] = {}

    def pack(self, value: Any, name: str = "") -> Any:
        """Return a value as JSON data; the names of its tensors begin with `name`.

        Raises:
            TypeError: a value has a type that cannot be serialised.
        """
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(value, name)}
        if isinstance(value, Layout):
            return {"lengths": list(value.lengths)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": None}
        if type(value) is list:
            return self._items(value, name)
        if type(value) is tuple:
            return {"tuple": self._items(value, name)}
        if type(value) is dict:
            pairs = enumerate(value.items())
            return {
                "dict": [
                    [self.pack(key), self.pack(item, _join(name, key if isinstance(key, str) else i))]
                    for i, (key, item) in pairs
                ]
            }
        if isinstance(value, type):
            if kept_whole.get(value.__name__) is not value:
                raise _unknown(value.__name__, name)
            return {"class": value.__name__}
        return self._object(value, name)

    def _items(self, values: Any, name: str) -> list[Any]:
        return [self.pack(item, _join(name, i)) for i, item in enumerate(values)]

    def _object(self, value: Any, name: str) -> dict[str, Any]:
        kind = type(value)
        if isinstance(value, Held):
            tag, parts = "format", _parts(value)
        elif kept_whole.get(kind.__name__) is kind:
            tag, parts = "object", value.written() if hasattr(kind, "written") else vars(value)
        else:
            raise _unknown(kind.__name__, name)
        if id(value) in self._numbers:
            return {"same": self._numbers[id(value)]}
        number = self._numbers[id(value)] = len(self._numbers)
        packed_fields = {key: self.pack(part, _join(name, key)) for key, part in parts.items()}
        return {tag: kind.__name__, "number": number, "fields": packed_fields}

    def _tensor(self, tensor: Tensor, name: str) -> str:
        tensor = tensor.detach()
        if not tensor.numel():
            key: tuple[Any, ...] = (name,)
        else:
            key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._names:
            while name in self.tensors:
                name += "'"
            self._names[key] = name
            self.tensors[name] = tensor
        return self._names[key]


class Unpacker:
    """Restores objects from JSON data and tensors by name; all devices become `device`."""

    def __init__(self, tensors: Any, device: torch.device | str = "cpu") -> None:
        self.tensors, self.device = tensors, torch.device(device)
        self._loaded: dict[str, Tensor] = {}
        self._objects: dict[int, Any] = {}

    def unpack(self, plain: Any) -> Any:
        """Restore the value that `Packer.pack` serialised.

        Raises:
            ValueError: a format or class is not registered, or the data do not have the form that `pack` returns.
        """
        if isinstance(plain, list):
            return [self.unpack(item) for item in plain]
        if not isinstance(plain, dict):
            return plain
        kind: str = next(iter(plain), "")
        content: Any = plain.get(kind)
        if kind == "tensor":
            if content not in self._loaded:
                self._loaded[content] = self.tensors[content]
            return self._loaded[content]
        if kind == "tuple":
            return tuple(self.unpack(item) for item in content)
        if kind == "dict":
            return {self.unpack(key): self.unpack(packed) for key, packed in content}
        if kind == "lengths":
            return Layout(content)
        if kind == "float":
            return float(content)
        if kind == "dtype":
            return dtype_of(content)
        if kind == "device":
            return self.device
        if kind == "same":
            return self._objects[content]
        if kind == "class":
            return _class(content)
        if kind == "format":
            return self._format(plain)
        if kind == "object":
            restored: Any = object.__new__(_class(content))
            self._objects[plain["number"]] = restored
            check_names(type(restored), plain["fields"])
            vars(restored).update({name: self.unpack(packed) for name, packed in plain["fields"].items()})
            return restored
        raise ValueError(f"data of a file have the unknown kind {kind!r}")

    def _format(self, plain: dict[str, Any]) -> Held:
        kind = Held.formats.get(plain["format"])
        if kind is None:
            raise ValueError(f"storage format {plain['format']!r} is not one of {sorted(Held.formats)}")
        restored = object.__new__(kind)
        self._objects[plain["number"]] = restored
        packed_fields = plain["fields"]
        for entry in fields(kind):  # type: ignore[arg-type]
            missing: Any = {} if entry.default_factory is dict else None
            setattr(
                restored, entry.name, self.unpack(packed_fields[entry.name]) if entry.name in packed_fields else missing
            )
        restored._place()
        return restored


def pack(held: Held) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all tensors of one storage by name, and all other data as JSON."""
    packer = Packer()
    plain = packer.pack(held)
    return packer.tensors, plain


def unpack(tensors: dict[str, Tensor], plain: dict[str, Any]) -> Any:
    """Restore the storage that `pack` serialised.

    Raises:
        ValueError: the format is not registered.
    """
    return Unpacker(tensors).unpack(plain)


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of this name.

    Raises:
        ValueError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return dtype


def _parts(held: Held) -> dict[str, Any]:
    """Return the fields to serialise: all except derived ones, of which only the indexes of selectors are included."""
    values = {name: getattr(held, name) for name in held.declared()}
    derived = {name for name, declared in held.declared().items() if declared.kind == "derived"}
    return {
        name: value
        for name, value in values.items()
        if value is not None and (name not in derived or isinstance(value, dict))
    }


def _unknown(kind: str, name: str) -> TypeError:
    return TypeError(
        f"{name or 'a cache'} is of the class {kind}, which cannot be written to a file: extend Held or Observer, or "
        "register the class with kvpress.cache.files.keep_whole"
    )


def _class(name: str) -> type:
    if name not in kept_whole:
        raise ValueError(f"the file holds a {name}, an unknown class: first define or import the classes of the press")
    return kept_whole[name]


def check_names(kind: type, names: Iterable[Any]) -> None:
    """Check that no attribute from a file replaces a method.

    Raises:
        ValueError: one does, or its name is not text.
    """
    for name in names:
        if not isinstance(name, str) or callable(getattr(kind, name, None)):
            raise ValueError(f"{kind.__name__} has no attribute {name!r} that a file may set")


def _join(name: str, part: Any) -> str:
    return f"{name}.{part}" if name else str(part)
