"""Storage formats taken apart into named tensors and plain data, as files keep them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from kvpress.cache.held import Held
from kvpress.cache.layout import Layout


def pack(held: Held) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return all tensors by name, and everything else as JSON knows it; what is derived is left out."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, Any] = {"format": type(held).__name__}
    for name, declared in held.declared().items():
        value = getattr(held, name)
        if declared.kind == "derived" or value is None:
            continue
        if isinstance(value, Tensor):
            tensors[name] = value
        elif isinstance(value, (Held, dict)):
            inner, plain[name] = pack(value) if isinstance(value, Held) else (value, {"arrays": sorted(value)})
            tensors |= {f"{name}.{key}": tensor for key, tensor in inner.items()}
        else:
            plain[name] = _plain(value)
    return tensors, plain


def unpack(tensors: dict[str, Tensor], plain: dict[str, Any]) -> Any:
    """Return what `pack` took apart.

    Raises:
        ValueError: the format is not known here.
    """
    kind = Held.formats.get(plain["format"])
    if kind is None:
        raise ValueError(f"storage format {plain['format']!r} is not one of {sorted(Held.formats)}")
    made = object.__new__(kind)
    for own in fields(kind):  # type: ignore[arg-type]
        name, said = own.name, plain.get(own.name)
        inside = {key[len(name) + 1 :]: tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
        if isinstance(said, dict) and "format" in said:
            value = unpack(inside, said)
        elif isinstance(said, dict) and "arrays" in said:
            value = inside
        elif name in tensors or said is not None:
            value = tensors[name] if name in tensors else _read(said)
        else:
            value = {} if own.default_factory is dict else None
        setattr(made, name, value)
    made._place()
    return made


def _plain(value: Any) -> Any:
    if isinstance(value, Layout):
        return {"lengths": list(value.lengths)}
    if isinstance(value, (torch.dtype, torch.device)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    return list(value) if isinstance(value, tuple) else value


def _read(said: Any) -> Any:
    if not isinstance(said, dict):
        return tuple(said) if isinstance(said, list) else said
    ((kind, content),) = said.items()
    if kind == "lengths":
        return Layout(content)
    return torch.device(content) if kind == "device" else getattr(torch, content)
