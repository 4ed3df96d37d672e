# SPDX-License-Identifier: Apache-2.0
"""Header of a cache file: description, types and offsets of its tensors, digests. Read without torch.

Types have the names of safetensors, such as `BF16`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

FORMAT = "kvpress cache"
VERSION = 2
"""Version of the format. Files of other versions are refused: version 1 recognised a model by its query projections alone."""
ALIGN = 64
MOST_HEADER = 100 * 2**20
"""Maximum length of a header that safetensors reads."""
NO_DIGEST = "0" * 64
MOST_DIMENSIONS = 8
"""Maximum dimensions of a tensor in a file."""

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "BOOL": 1,
}  # fmt: skip
"""Bytes of a number of each type."""


@dataclass(frozen=True)
class Place:
    """Location of a tensor in the data."""

    dtype: str
    """Stored type, U8 for compressed tensors."""
    shape: tuple[int, ...]
    """Stored shape."""
    start: int
    """First byte."""
    end: int
    """One past the last byte."""
    packed: tuple[str, tuple[int, ...]] | None = None
    """Type and shape after decompression; None for uncompressed tensors."""


@dataclass
class Header:
    """Description of the data of a file."""

    about: dict[str, Any]
    """JSON data about the cache."""
    places: dict[str, Place] = field(default_factory=dict)
    """Location of every tensor by name."""
    blocks: list[tuple[str, int, int]] = field(default_factory=list)
    """Name, start and end of every block."""
    digests: list[str] = field(default_factory=list)
    """SHA-256 of every block."""
    contents: list[list[Place]] = field(default_factory=list)
    """Locations in each block, if the header was read from a file."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the data after decompression."""
        packed = [place for place in self.places.values() if place.packed is not None]
        more = sum(2 * math.prod(place.packed[1]) - (place.end - place.start) for place in packed if place.packed)
        return self.data_bytes + more

    @property
    def data_bytes(self) -> int:
        """Bytes of the data."""
        return self.blocks[-1][2] if self.blocks else 0

    def to_bytes(self) -> bytes:
        """Return the encoded header, its length first; digests do not change its length."""
        digests = self.digests or [NO_DIGEST] * len(self.blocks)
        packed = {n: [p.packed[0], list(p.packed[1])] for n, p in self.places.items() if p.packed is not None}
        metadata = {
            "format": FORMAT,
            "version": str(VERSION),
            "about": _dumps(self.about),
            "blocks": _dumps(self.blocks),
            "packed": _dumps(packed),
            "digests": _dumps(digests),
            "sha256": NO_DIGEST,
        }
        table = {
            name: {"dtype": p.dtype, "shape": list(p.shape), "data_offsets": [p.start, p.end]}
            for name, p in self.places.items()
        }
        text = _dumps({"__metadata__": metadata, **table}).encode()
        text += b" " * (-(len(text) + 8) % ALIGN)
        if len(text) > MOST_HEADER:
            raise ValueError(f"the header of this cache takes {len(text)} bytes, more than {MOST_HEADER}")
        text = text.replace(_digest_field(NO_DIGEST), _digest_field(hashlib.sha256(text).hexdigest()), 1)
        return len(text).to_bytes(8, "little") + text

    @classmethod
    def from_bytes(cls, text: bytes) -> Header:
        """Parse a header without its length, and check that lengths and offsets are consistent.

        Raises:
            ValueError: it is not a header of kvpress, has another version, was altered, or has contradictory lengths; the
                message continues the name of the file.
        """
        table = _loads(text, "is not a file of kvpress: it has no header of safetensors")
        metadata = table.pop("__metadata__", None) if isinstance(table, dict) else None
        if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
            raise ValueError("is a file of safetensors, but holds no cache of kvpress")
        if (version := metadata.get("version")) != str(VERSION):
            remedy = (
                "it recognises a model by its query projections alone; write the cache again with `kvpress.save` or "
                "`kvpress compress`"
                if version == "1"
                else "upgrade kvpress"
            )
            raise ValueError(
                f"has version {version!r} of the format, and this kvpress reads version {VERSION}: {remedy}"
            )
        digest = str(metadata.get("sha256", ""))
        if hashlib.sha256(text.replace(_digest_field(digest), _digest_field(NO_DIGEST), 1)).hexdigest() != digest:
            raise ValueError("is damaged: its header does not match its digest")
        parts = {name: _loads(metadata.get(name), f"is damaged: {name!r} is not readable") for name in PARTS}
        blocks = _blocks_of(parts["blocks"], parts["digests"])
        places = {name: _place_of(name, entry) for name, entry in table.items()}
        for name, entry in _record(parts["packed"], "packed").items():
            places[name] = _packed_place(name, places.get(name), entry)
        header = cls(_record(parts["about"], "about"), places, blocks, parts["digests"])
        header.contents = _contents(places, blocks)
        return header


PARTS = ("about", "blocks", "packed", "digests")
"""Keys of the metadata whose values are JSON."""
LARGEST = 2**62
"""Upper bound of lengths and offsets in a file."""


def _loads(text: Any, problem: str) -> Any:
    """Parse JSON of a file.

    Raises:
        ValueError: with message `problem`, if the text is not JSON, has NaN or infinity, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(problem) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _record(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"is damaged: {name!r} is not an object")
    return value


def is_length(value: Any) -> bool:
    """Return whether a value of a file can be a length or an offset."""
    return type(value) is int and 0 <= value < LARGEST


def _bytes_of(name: str, kind: Any, shape: Any) -> int:
    """Return the bytes of a tensor from its type and shape in a file."""
    if not isinstance(kind, str) or kind not in ITEM_BYTES:
        raise ValueError(f"is damaged: the type of {name!r} is {kind!r}, not one of {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS or not all(map(is_length, shape)):
        raise ValueError(f"is damaged: the shape of {name!r} is no list of at most {MOST_DIMENSIONS} lengths")
    return math.prod(shape) * ITEM_BYTES[kind]


def _place_of(name: str, entry: Any) -> Place:
    entry = _record(entry, name)
    kind, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    size = _bytes_of(name, kind, shape)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_length, offsets)):
        raise ValueError(f"is damaged: the place of {name!r} is no pair of offsets")
    start, end = offsets
    if end - start != size:
        raise ValueError(f"is damaged: {name!r} takes {size} bytes, and has a place of {end - start}")
    return Place(kind, tuple(shape), start, end)


def _packed_place(name: str, place: Place | None, entry: Any) -> Place:
    if place is None or place.dtype != "U8" or len(place.shape) != 1:
        raise ValueError(f"is damaged: {name!r} is packed, but does not lie there as bytes")
    if not isinstance(entry, list) or len(entry) != 2 or entry[0] not in ("F16", "BF16"):
        raise ValueError(f"is damaged: {name!r} is packed from {entry!r}, not from numbers of 16 bits")
    if _bytes_of(name, *entry) >= LARGEST:
        raise ValueError(f"is damaged: {name!r} is packed from too many numbers")
    return replace(place, packed=(entry[0], tuple(entry[1])))


def _blocks_of(blocks: Any, digests: Any) -> list[tuple[str, int, int]]:
    """Parse the list of blocks, which must be contiguous and each have a digest."""
    if not isinstance(blocks, list) or not isinstance(digests, list) or len(blocks) != len(digests) or not blocks:
        raise ValueError("is damaged: not every block has a digest")
    if not all(isinstance(digest, str) and len(digest) == len(NO_DIGEST) for digest in digests):
        raise ValueError(f"is damaged: a digest is no text of {len(NO_DIGEST)} digits")
    parsed, end = [], 0
    for entry in blocks:
        if not isinstance(entry, list) or len(entry) != 3 or not isinstance(entry[0], str):
            raise ValueError("is damaged: a block is not a name and two places")
        name, start, stop = entry
        if not is_length(stop) or start != end or stop < start or stop % ALIGN:
            raise ValueError(
                f"is damaged: block {name!r} does not begin where the one before ends, or not at {ALIGN} bytes"
            )
        parsed.append((name, start, stop))
        end = stop
    return parsed


def _contents(places: Mapping[str, Place], blocks: Sequence[tuple[str, int, int]]) -> list[list[Place]]:
    """Return the locations in each block, which must fill it contiguously in the order of the header."""
    contents: list[list[Place]] = [[] for _ in blocks]
    number = end = 0
    for name, place in places.items():
        while place.start < place.end and number < len(blocks) - 1 and place.start >= blocks[number][2]:
            number += 1
        if place.start != end or place.end > blocks[number][2]:
            raise ValueError(f"is damaged: {name!r} does not lie behind the tensor before it, within one block")
        contents[number].append(place)
        end = place.end
    if end != blocks[-1][2]:
        raise ValueError(f"is damaged: tensors take {end} bytes, and blocks {blocks[-1][2]}")
    return contents


def read_header(path: str | Path) -> tuple[Header, int]:
    """Read the header of a file; return it with the offset of the data.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        ValueError: the file is cut off, damaged, has another version, or is not a cache.
    """
    with opened(Path(path)) as file:
        return header_of(file, Path(path))


def opened(path: Path) -> BinaryIO:
    """Open a file for reading; raises as `read_header`."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a cache is read from a file, and this is a folder", str(path))
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "there is no such file; kvpress.save writes one", str(path))
    return path.open("rb")


def header_of(file: BinaryIO, path: Path) -> tuple[Header, int]:
    """Read the header of an open file, also if `path` is replaced meanwhile."""
    size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
    text = file.read(length) if 2 <= length <= min(MOST_HEADER, size) else b""
    if length < 2 or length > MOST_HEADER:
        raise ValueError(f"{path} is not a file of kvpress: it has no header of safetensors")
    if len(text) < length:
        raise ValueError(f"{path} is cut off: its header takes {length} bytes, and the file has {size}")
    try:
        header = Header.from_bytes(text)
        if size != 8 + length + header.data_bytes:
            raise ValueError(
                f"is cut off or has something behind it: {8 + length + header.data_bytes} bytes were written, it has {size}"
            )
        with safe_open(str(path), framework="np"):  # safetensors checks types, shapes and offsets
            return header, 8 + length
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} {error if isinstance(error, ValueError) else 'is damaged'}") from error
    except SafetensorError as error:
        raise ValueError(f"{path} is not a file of safetensors that can be read: {error}") from error


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _digest_field(digest: str) -> bytes:
    return f'"sha256":"{digest}"'.encode()
