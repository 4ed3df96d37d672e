# SPDX-License-Identifier: Apache-2.0
"""Caches taken apart into named tensors and plain data, as files and transfers keep them, and put together again.

Only a closed set of types is written, so that no code comes out of a file: plain data, tensors, containers of both, storage
formats (`kvpress.cache.storage`), and objects of the classes in `kept_whole`. Objects that layers share, such as a table, are
written once and shared again after reading.
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
"""Classes by name whose objects are all that their attributes hold, or what their method `written` returns."""


def keep_whole(kind: ClassT) -> ClassT:
    """Let objects of a class be written: whatever their attributes hold must be of what can be written too.

    Raises:
        TypeError: another class of kvpress has this name, so that a file could not tell them apart.
    """
    known = kept_whole.get(kind.__name__)
    ours = known is not None and all(each.__module__.startswith("kvpress.") for each in (known, kind))
    if known is not None and ours and known.__module__ != kind.__module__:
        raise TypeError(
            f"{kind.__module__} and {known.__module__} both define {kind.__name__}, which files know by name"
        )
    kept_whole[kind.__name__] = kind
    return kind


for _kind in (KVStore, Window, Dense, Packed, FileTier):
    keep_whole(_kind)


class Packer:
    """Takes objects apart; `tensors` are those of all of them, by name, each once."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._numbers: dict[int, int] = {}

    def pack(self, value: Any, name: str = "") -> Any:
        """Return a value as JSON knows it; its tensors are named after it.

        Raises:
            TypeError: it holds what cannot be written.
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
                    [self.pack(key), self.pack(held, _join(name, key if isinstance(key, str) else i))]
                    for i, (key, held) in pairs
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
            said, parts = "format", _parts(value)
        elif kept_whole.get(kind.__name__) is kind:
            said, parts = "object", value.written() if hasattr(kind, "written") else vars(value)
        else:
            raise _unknown(kind.__name__, name)
        if id(value) in self._numbers:
            return {"same": self._numbers[id(value)]}
        number = self._numbers[id(value)] = len(self._numbers)
        held = {key: self.pack(part, _join(name, key)) for key, part in parts.items()}
        return {said: kind.__name__, "number": number, "fields": held}

    def _tensor(self, tensor: Tensor, name: str) -> str:
        tensor = tensor.detach()
        if not tensor.numel():
            place: tuple[Any, ...] = (name,)
        else:
            place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if place not in self._names:
            while name in self.tensors:
                name += "'"
            self._names[place] = name
            self.tensors[name] = tensor
        return self._names[place]


class Unpacker:
    """Puts objects together from their tensors by name; devices that they name become `device`."""

    def __init__(self, tensors: Any, device: torch.device | str = "cpu") -> None:
        self.tensors, self.device = tensors, torch.device(device)
        self._loaded: dict[str, Tensor] = {}
        self._objects: dict[int, Any] = {}

    def unpack(self, plain: Any) -> Any:
        """Return what `Packer.pack` took apart.

        Raises:
            ValueError: a format or class is not known here, or the data are not of the form that `pack` returns.
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
            return {self.unpack(key): self.unpack(held) for key, held in content}
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
            made: Any = object.__new__(_class(content))
            self._objects[plain["number"]] = made
            check_names(type(made), plain["fields"])
            vars(made).update({name: self.unpack(held) for name, held in plain["fields"].items()})
            return made
        raise ValueError(f"data of a file begin with {kind!r}, which is not known here")

    def _format(self, plain: dict[str, Any]) -> Held:
        kind = Held.formats.get(plain["format"])
        if kind is None:
            raise ValueError(f"storage format {plain['format']!r} is not one of {sorted(Held.formats)}")
        made = object.__new__(kind)
        self._objects[plain["number"]] = made
        said = plain["fields"]
        for own in fields(kind):  # type: ignore[arg-type]
            missing: Any = {} if own.default_factory is dict else None
            setattr(made, own.name, self.unpack(said[own.name]) if own.name in said else missing)
        made._place()
        return made


def pack(held: Held) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all tensors of one storage by name, and everything else as JSON knows it."""
    packer = Packer()
    plain = packer.pack(held)
    return packer.tensors, plain


def unpack(tensors: dict[str, Tensor], plain: dict[str, Any]) -> Any:
    """Return what `pack` took apart.

    Raises:
        ValueError: the format is not known here.
    """
    return Unpacker(tensors).unpack(plain)


def dtype_of(name: str) -> torch.dtype:
    """Return the type of tensors that is called so.

    Raises:
        ValueError: there is none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a type of tensors")
    return found


def _parts(held: Held) -> dict[str, Any]:
    """Return the fields of a storage that are written: of what is derived, only what selectors looked up."""
    values = {name: getattr(held, name) for name in held.declared()}
    derived = {name for name, declared in held.declared().items() if declared.kind == "derived"}
    return {
        name: value
        for name, value in values.items()
        if value is not None and (name not in derived or isinstance(value, dict))
    }


def _unknown(kind: str, name: str) -> TypeError:
    return TypeError(
        f"{name or 'a cache'} is of the class {kind}, which cannot be written to a file: a class whose objects a cache keeps "
        "extends Held or Observer, or is marked with kvpress.cache.files.keep_whole"
    )


def _class(name: str) -> type:
    if name not in kept_whole:
        raise ValueError(
            f"the file holds a {name}, a class that is not known here: define or import what the press was made with first"
        )
    return kept_whole[name]


def check_names(kind: type, names: Iterable[Any]) -> None:
    """Refuse attributes that would take the place of methods.

    Raises:
        ValueError: there is one.
    """
    for name in names:
        if not isinstance(name, str) or callable(getattr(kind, name, None)):
            raise ValueError(f"{kind.__name__} has no attribute {name!r} that a file could give")


def _join(name: str, part: Any) -> str:
    return f"{name}.{part}" if name else str(part)
