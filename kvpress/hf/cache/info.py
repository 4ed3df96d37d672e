# SPDX-License-Identifier: Apache-2.0
"""Description of a cache in a file, read from its header alone and without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from kvpress.cache.header import Header, is_length, read_header
from kvpress.counts import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from kvpress.core.press import BasePress

_OR_NONE = {"tokenizer": str, "press": dict, "spec": str, "tokens": dict, "mask": dict}
_ABOUT = {
    "model": dict, "configuration": dict, "shared": dict, "notes": dict, "report": dict, "versions": dict, "layers": list,
    "dtype": str,
}  # fmt: skip
_REPORT = ("kept", "seen", "memory_bytes", "uncompressed_bytes")
_MODEL = {
    "name": str,
    "architecture": str,
    "layers": int,
    "kv_heads": list,
    "head_dim": list,
    "weights": str,
}


@dataclass(frozen=True)
class CacheInfo:
    """Description of the cache in a file."""

    path: Path
    """Path of the file."""
    model: dict[str, Any]
    """Name, architecture, shapes and digest of the weights of the model."""
    press: str | None
    """Spec of the press; None if the cache was saved without one."""
    dtype: str
    """Data type of the model."""
    batch: int
    """Rows."""
    length: int
    """Tokens of a row, padding included."""
    kept: int
    """Stored pairs."""
    seen: int
    """Pairs of the full cache."""
    memory_bytes: int
    """Bytes of the cache in memory."""
    uncompressed_bytes: int
    """Bytes of the full cache in memory."""
    file_bytes: int
    """Bytes of the file."""
    header_bytes: int
    """Bytes of the header of the file."""
    versions: dict[str, str]
    """Versions of the libraries that wrote the file."""
    notes: dict[str, Any]
    """Notes of the user."""
    header: Header
    """Header of the file."""

    @property
    def tokens(self) -> Tensor | None:
        """Token ids that the cache has read, int64 `[B, seen]`; None if they were not saved."""
        return self._given("tokens")

    @property
    def mask(self) -> Tensor | None:
        """Mask of real tokens, int64 `[B, seen]`; None if it was not saved."""
        return self._given("mask")

    def _given(self, name: str) -> Tensor | None:
        if self.header.about[name] is None:
            return None
        from kvpress.cache.container import open_file
        from kvpress.cache.files import Unpacker

        _, tensors = open_file(self.path, verify=False)
        tensor: Tensor = Unpacker(tensors).unpack(self.header.about[name]).long()
        return tensor

    def get_press(self) -> BasePress | None:
        """Return the press of the cache, or None if it was saved without one."""
        from kvpress.core.spec import press_from_dict

        plain = self.header.about["press"]
        return None if plain is None else press_from_dict(plain)

    def __str__(self) -> str:
        model, factor = self.model, self.uncompressed_bytes / max(1, self.memory_bytes)
        rows = f"{self.batch} x " if self.batch > 1 else ""
        return "\n".join((
            f"{self.path}: {format_bytes(self.file_bytes)}, header {format_bytes(self.header_bytes)}",
            f"model    {model['name']} ({model['architecture']}, {model['layers']} layers), {self.dtype}",
            f"weights  {model['weights']}",
            f"press    {'not known' if self.press is None else self.press}",
            f"read     {rows}{self.length} tokens{'' if self.header.about['tokens'] is None else ', ids known'}",
            f"holds    {self.kept} of {self.seen} pairs, {format_bytes(self.memory_bytes)} in memory, "
            f"{factor:.1f} times smaller",
            f"made by  {', '.join(f'{name} {version}' for name, version in self.versions.items())}",
        ))  # fmt: skip


def cache_info(path: str | Path) -> CacheInfo:
    """Return the description of the cache in a file; reads only the header.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is truncated, damaged, of a later version or not a cache.
    """
    header, begin = read_header(path)
    check_description(header, str(path))
    about = header.about
    return CacheInfo(
        path=Path(path), file_bytes=begin + header.data_bytes, header_bytes=begin, header=header,
        press=None if about["press"] is None else about["spec"],
        **{name: about[name] for name in ("model", "dtype", "batch", "length", "versions", "notes")}, **about["report"],
    )  # fmt: skip


def check_description(header: Header, source: str) -> None:
    """Check the description of a cache: its entries have the right types, and there is a block for every layer.

    Raises:
        ValueError: an entry is missing, of another type, or does not fit the others.
    """
    about = header.about
    expected: dict[str, dict[str, Any]] = {"model": _MODEL, "about": _ABOUT, "report": dict.fromkeys(_REPORT, int)}
    records = {"about": about, **{name: about.get(name) for name in ("model", "report")}}
    wrong = [name for name in ("batch", "length") if not is_length(about.get(name)) or not about[name]]
    wrong += [
        name for name, kind in _OR_NONE.items() if name not in about or not isinstance(about[name], (kind, NoneType))
    ]
    for section, record in records.items():
        for name, kind in expected[section].items():
            value = record.get(name) if isinstance(record, dict) else None
            if not isinstance(value, kind) or (kind is int and not is_length(value)):
                wrong.append(name)
    if wrong:
        raise ValueError(f"{source} is damaged: {', '.join(dict.fromkeys(wrong))} of its description cannot be used")
    if [name for name, _, _ in header.blocks] != ["cache", *(f"layers.{i}" for i in range(len(about["layers"])))]:
        raise ValueError(f"{source} is damaged: it has not one block for each of {len(about['layers'])} layers")
    for index, layer in enumerate(about["layers"]):
        is_layer = (
            isinstance(layer, dict) and isinstance(layer.get("kind"), str) and isinstance(layer.get("state"), dict)
        )
        if not is_layer or not all(
            is_length(layer.get(name)) and layer[name] <= about["length"] for name in ("seen", "stored")
        ):
            raise ValueError(f"{source} is damaged: layer {index} is not described as one of {about['length']} tokens")
