# SPDX-License-Identifier: Apache-2.0
"""The file that caches are kept in: safetensors, block by block, each block with its digest.

    8 bytes    length of the header
    header     JSON as safetensors has it: name, type, shape and place of every tensor; `__metadata__` holds the rest as text
    data       the tensors in the order of the header: blocks, of a layer each, that begin at multiples of 64 bytes

Any reader of safetensors reads it. It is not written by the library's own writer, which sorts all tensors by type and holds a
second copy of them: layers must come in order, so that a transfer can begin with the first. A digest of the header and one of
every block are compared before anything is used. A stream carries the same bytes, and after every block its digest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

FORMAT = "kvpress cache"
VERSION = 2
"""Version of the format. Files of other versions are refused: version 1 recognised a model by its query projections alone."""
ALIGN = 64
MOST_HEADER = 100 * 2**20
"""Longest header that the library of safetensors reads."""
CHUNK = 2**22
"""Bytes that are copied at a time."""
PAYS = 0.9
"""Share of its bytes that a tensor may take packed; one that would take more is written as it is."""
SMALL = 4096
"""Bytes below which nothing is packed."""
NO_DIGEST = "0" * 64
MOST_DIMENSIONS = 8
"""Dimensions of a tensor in a file."""
DIGEST = 32
"""Bytes of a digest."""

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in TYPES.items()}


@dataclass(frozen=True)
class Block:
    """Tensors that are written together, by name."""

    name: str
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the data; `packed` are its type and shape where what lies there is packed."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int
    packed: tuple[torch.dtype, tuple[int, ...]] | None = None


@dataclass
class Header:
    """Description of the data of a file: `about`, plain; `places` of tensors; `blocks` with their names, starts and ends.

    `contents` are the places of each block, of a header that was read.
    """

    about: dict[str, Any]
    places: dict[str, Place] = field(default_factory=dict)
    blocks: list[tuple[str, int, int]] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    contents: list[list[Place]] = field(default_factory=list)

    @property
    def held_bytes(self) -> int:
        """Bytes of the data once they are unpacked."""
        packed = [place for place in self.places.values() if place.packed is not None]
        more = sum(2 * math.prod(place.packed[1]) - (place.end - place.start) for place in packed if place.packed)
        return self.data_bytes + more

    @property
    def data_bytes(self) -> int:
        """Bytes of the data."""
        return self.blocks[-1][2] if self.blocks else 0

    def to_bytes(self) -> bytes:
        """Return the header as it is written, its length first; as long with digests as without."""
        digests = self.digests or [NO_DIGEST] * len(self.blocks)
        packed = {n: [_NAMES[p.packed[0]], list(p.packed[1])] for n, p in self.places.items() if p.packed is not None}
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
            name: {"dtype": _NAMES[p.dtype], "shape": list(p.shape), "data_offsets": [p.start, p.end]}
            for name, p in self.places.items()
        }
        text = _dumps({"__metadata__": metadata, **table}).encode()
        text += b" " * (-(len(text) + 8) % ALIGN)
        if len(text) > MOST_HEADER:
            raise ValueError(f"what is to be said of this cache takes {len(text)} bytes, more than {MOST_HEADER}")
        text = text.replace(_digest_field(NO_DIGEST), _digest_field(hashlib.sha256(text).hexdigest()), 1)
        return len(text).to_bytes(8, "little") + text

    @classmethod
    def from_bytes(cls, text: bytes) -> Header:
        """Read a header without its length; what it gives as lengths and places is checked against each other.

        Raises:
            ValueError: it is not one of ours, of another version, altered, or its lengths contradict each other; the message
                continues the name of the file.
        """
        table = _loads(text, "is not a file of kvpress: it has no header of safetensors")
        metadata = table.pop("__metadata__", None) if isinstance(table, dict) else None
        if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
            raise ValueError("is a file of safetensors, but holds no cache of kvpress: its metadata do not say so")
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
        said = str(metadata.get("sha256", ""))
        if hashlib.sha256(text.replace(_digest_field(said), _digest_field(NO_DIGEST), 1)).hexdigest() != said:
            raise ValueError("is damaged: its header is not what was written")
        parts = {name: _loads(metadata.get(name), f"is damaged: {name!r} is not readable") for name in PARTS}
        blocks = _blocks_of(parts["blocks"], parts["digests"])
        places = {name: _place_of(name, entry) for name, entry in table.items()}
        for name, entry in _record(parts["packed"], "packed").items():
            places[name] = _packed_place(name, places.get(name), entry)
        header = cls(_record(parts["about"], "about"), places, blocks, parts["digests"])
        header.contents = _contents(places, blocks)
        return header


PARTS = ("about", "blocks", "packed", "digests")
"""Parts of the metadata that are JSON themselves."""
LARGEST = 2**62
"""Bound of lengths and places in a file."""


def _loads(text: Any, problem: str) -> Any:
    """Read JSON of a file.

    Raises:
        ValueError: `problem`, where it is no JSON, has numbers that JSON does not know, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(problem) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _record(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"is damaged: {name!r} is not an object")
    return value


def is_length(value: Any) -> bool:
    """Whether a value of a file can be a length or a place."""
    return type(value) is int and 0 <= value < LARGEST


def _bytes_of(name: str, kind: Any, shape: Any) -> int:
    """Return the bytes of a tensor, with its type and shape as they are written."""
    if not isinstance(kind, str) or kind not in TYPES:
        raise ValueError(f"is damaged: the type of {name!r} is {kind!r}, not one of {', '.join(TYPES)}")
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS or not all(map(is_length, shape)):
        raise ValueError(f"is damaged: the shape of {name!r} is no list of at most {MOST_DIMENSIONS} lengths")
    return math.prod(shape) * TYPES[kind].itemsize


def _place_of(name: str, entry: Any) -> Place:
    entry = _record(entry, name)
    kind, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    size = _bytes_of(name, kind, shape)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_length, offsets)):
        raise ValueError(f"is damaged: the place of {name!r} is no pair of offsets")
    start, end = offsets
    if end - start != size:
        raise ValueError(f"is damaged: {name!r} takes {size} bytes, and has a place of {end - start}")
    return Place(TYPES[kind], tuple(shape), start, end)


def _packed_place(name: str, place: Place | None, entry: Any) -> Place:
    if place is None or place.dtype != torch.uint8 or len(place.shape) != 1:
        raise ValueError(f"is damaged: {name!r} is packed, but does not lie there as bytes")
    if not isinstance(entry, list) or len(entry) != 2 or entry[0] not in ("F16", "BF16"):
        raise ValueError(f"is damaged: {name!r} is packed from {entry!r}, not from numbers of 16 bits")
    if _bytes_of(name, *entry) >= LARGEST:
        raise ValueError(f"is damaged: {name!r} is packed from too many numbers")
    return replace(place, packed=(TYPES[entry[0]], tuple(entry[1])))


def _blocks_of(blocks: Any, digests: Any) -> list[tuple[str, int, int]]:
    """Return blocks that follow one another without gaps, each with a digest."""
    if not isinstance(blocks, list) or not isinstance(digests, list) or len(blocks) != len(digests) or not blocks:
        raise ValueError("is damaged: not every block has a digest")
    if not all(isinstance(digest, str) and len(digest) == len(NO_DIGEST) for digest in digests):
        raise ValueError(f"is damaged: a digest is no text of {len(NO_DIGEST)} digits")
    found, end = [], 0
    for entry in blocks:
        if not isinstance(entry, list) or len(entry) != 3 or not isinstance(entry[0], str):
            raise ValueError("is damaged: a block is not a name and two places")
        name, start, stop = entry
        if not is_length(stop) or start != end or stop < start or stop % ALIGN:
            raise ValueError(
                f"is damaged: block {name!r} does not begin where the one before ends, or not at {ALIGN} bytes"
            )
        found.append((name, start, stop))
        end = stop
    return found


def _contents(places: Mapping[str, Place], blocks: Sequence[tuple[str, int, int]]) -> list[list[Place]]:
    """Return the places of each block, which they fill one after another, in the order of the header."""
    found: list[list[Place]] = [[] for _ in blocks]
    number = end = 0
    for name, place in places.items():
        while place.start < place.end and number < len(blocks) - 1 and place.start >= blocks[number][2]:
            number += 1
        if place.start != end or place.end > blocks[number][2]:
            raise ValueError(f"is damaged: {name!r} does not lie behind the tensor before it, within one block")
        found[number].append(place)
        end = place.end
    if end != blocks[-1][2]:
        raise ValueError(f"is damaged: tensors take {end} bytes, and blocks {blocks[-1][2]}")
    return found


class Writing:
    """Blocks laid out one after another: `header`, and the bytes of each."""

    def __init__(self, about: dict[str, Any], blocks: Sequence[Block], compress: str | None = None) -> None:
        check_compression(compress)
        self.header = Header(about)
        self._parts: list[list[Tensor | bytes]] = []
        end = 0
        for block in blocks:
            start, parts = end, []
            held = [(name, tensor, _packed(tensor) if compress else None) for name, tensor in block.tensors.items()]
            # Wider types first, and what has any length last, so that each lies at a multiple of its size.
            held.sort(key=lambda item: (item[2] is not None, -item[1].element_size()))
            for name, tensor, small in held:
                kind = tensor.dtype, tuple(tensor.shape)
                size = tensor.numel() * tensor.element_size() if small is None else len(small)
                place = Place(*kind, end, end + size)
                if small is not None:
                    place = Place(torch.uint8, (size,), end, end + size, packed=kind)
                self.header.places[name] = place
                parts.append(tensor if small is None else small)
                end += size
            if gap := -end % ALIGN:
                self.header.places[f"padding.{block.name}"] = Place(torch.uint8, (gap,), end, end + gap)
                parts.append(bytes(gap))
                end += gap
            self._parts.append(parts)
            self.header.blocks.append((block.name, start, end))

    def chunks(self, number: int) -> Iterator[memoryview]:
        """Return the bytes of a block, some megabytes at a time."""
        for part in self._parts[number]:
            yield from [memoryview(part)] if isinstance(part, bytes) else _pieces(part)


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Return the bytes of a tensor in order; of one that lies elsewhere or with gaps, no more than a piece is copied."""
    if not tensor.numel():
        return
    tensor = tensor[None] if tensor.dim() == 0 else tensor
    rows = CHUNK // tensor[0].nbytes
    if rows:
        for piece in tensor.split(rows):
            yield view_of(piece.cpu().contiguous())
    else:
        for row in tensor:
            yield from _pieces(row)


class Tensors:
    """The tensors of a file by name, each read when it is asked for: `read(place)` returns its bytes, uint8."""

    def __init__(self, header: Header, read: Callable[[Place], Tensor]) -> None:
        self.header, self._read = header, read

    def __getitem__(self, name: str) -> Tensor:
        place = self.header.places[name]
        flat = self._read(place)
        if place.packed is None:
            return (
                flat.view(place.dtype).view(place.shape)
                if flat.numel()
                else torch.empty(place.shape, dtype=place.dtype)
            )
        return _unpacked(flat, *place.packed)


def write(path: Path, writing: Writing) -> int:
    """Write a file in one step, so that a crash or a full disk leaves the old one or none; returns its bytes.

    Raises:
        OSError: the folder cannot be written to, the path is a folder, or the disk has no room.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a cache is written to a file, and this is a folder", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the folder that the file is to lie in does not exist", str(path.parent))
    head = writing.header.to_bytes()
    size = len(head) + writing.header.data_bytes
    if (free := shutil.disk_usage(path.parent).free) < size:
        raise OSError(errno.ENOSPC, f"the file takes {size} bytes, of which {free} are free", str(path))
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("xb") as file:
            file.write(head)
            for number in range(len(writing.header.blocks)):
                digest = hashlib.sha256()
                for chunk in writing.chunks(number):
                    digest.update(chunk)
                    file.write(chunk)
                writing.header.digests.append(digest.hexdigest())
            file.seek(0)
            file.write(writing.header.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return size


def read_header(path: str | Path) -> tuple[Header, int]:
    """Read what a file says of its data, and where these begin.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        ValueError: it is torn, damaged, of a later version, or no cache.
    """
    with _opened(Path(path)) as file:
        return _header_of(file, Path(path))


def _opened(path: Path) -> BinaryIO:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a cache is read from a file, and this is a folder", str(path))
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "there is no such file; kvpress.save writes one", str(path))
    return path.open("rb")


def _header_of(file: BinaryIO, path: Path) -> tuple[Header, int]:
    """Read the header of an open file, which another one may take the place of meanwhile."""
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
        with safe_open(str(path), framework="np"):  # the library checks types, shapes and places
            return header, 8 + length
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} {error if isinstance(error, ValueError) else 'is damaged'}") from error
    except SafetensorError as error:
        raise ValueError(f"{path} is not a file of safetensors that can be read: {error}") from error


def open_file(path: str | Path, verify: bool = True) -> tuple[Header, Tensors]:
    """Map a file into memory; with `verify`, its digests are compared first, which reads all of it once.

    Tensors lie in the file and are copied where they are written to. It must not be overwritten in place while they are in use;
    replacing or removing it is fine.

    Raises:
        OSError, ValueError: as `read_header`, or a digest differs.
    """
    with _opened(Path(path)) as file:
        header, begin = _header_of(file, Path(path))
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if verify:
        view = memoryview(mapped)
        for (name, start, end), digest in zip(header.blocks, header.digests, strict=True):
            if hashlib.sha256(view[begin + start : begin + end]).hexdigest() != digest:
                raise ValueError(f"{path} is damaged: block {name!r} is not what was written")
        view.release()

    def at(place: Place) -> Tensor:
        count = place.end - place.start
        if not count:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=begin + place.start)

    return header, Tensors(header, at)


def send_blocks(writing: Writing, write: Callable[[memoryview], None]) -> int:
    """Write the same bytes to a stream, each block followed by its digest, as its bytes; returns how many they are."""
    head = writing.header.to_bytes()
    write(memoryview(head))
    for number in range(len(writing.header.blocks)):
        digest = hashlib.sha256()
        for chunk in writing.chunks(number):
            digest.update(chunk)
            write(chunk)
        write(memoryview(digest.digest()))
    return len(head) + writing.header.data_bytes + DIGEST * len(writing.header.blocks)


def receive_header(fill: Callable[[memoryview], None], limit: int | None) -> Header:
    """Read the header of a stream; `fill` reads as many bytes as a view has.

    Raises:
        ValueError: what comes is no cache, or larger than `limit`.
    """
    first = bytearray(8)
    fill(memoryview(first))
    length = int.from_bytes(first, "little")
    if not 2 <= length <= MOST_HEADER:
        raise ValueError("what was sent is not a cache of kvpress: it has no header of safetensors")
    if limit is not None and length > limit:
        raise ValueError(f"the header of the cache alone takes {length} bytes, and at most {limit} are admitted")
    text = bytearray(length)
    fill(memoryview(text))
    try:
        header = Header.from_bytes(bytes(text))
    except ValueError as error:
        raise ValueError(f"what was sent {error}") from error
    if limit is not None and header.held_bytes > limit:
        raise ValueError(f"the cache takes {header.held_bytes} bytes, and at most {limit} are admitted (`limit`)")
    return header


def receive_block(header: Header, number: int, fill: Callable[[memoryview], None]) -> dict[int, Tensor]:
    """Read a block of a stream: the bytes of its tensors, by where these begin.

    Raises:
        ValueError: it is not what was sent.
    """
    name = header.blocks[number][0]
    found, digest = {}, hashlib.sha256()
    for place in header.contents[number]:
        if place.start < place.end:
            found[place.start] = _room_for(place)
            view = view_of(found[place.start])
            fill(view)
            digest.update(view)
    said = bytearray(DIGEST)
    fill(memoryview(said))
    if digest.digest() != said:
        raise ValueError(f"block {name!r} of the cache was damaged on its way")
    return found


def _room_for(place: Place) -> Tensor:
    size = place.end - place.start
    try:
        return torch.empty(size, dtype=torch.uint8)
    except RuntimeError as error:
        raise ValueError(
            f"a tensor of the cache takes {size} bytes, which this machine does not have; `limit` refuses such"
        ) from error


def view_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the host."""
    flat = tensor.flatten().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return flat.numpy().data


def check_compression(compress: str | None) -> None:
    """Refuse a way of packing that is not known, or that needs what is not installed."""
    if compress not in (None, "zstd"):
        raise ValueError(f"compress must be None or 'zstd', got {compress!r}")
    if compress == "zstd" and find_spec("zstandard") is None:
        raise ImportError("compress='zstd' needs the package zstandard: pip install 'kvpress-toolkit[zstd]'")


def _packed(tensor: Tensor) -> bytes | None:
    """Return numbers of 16 bits packed, low bytes first and high bytes after them; None where that does not pay."""
    size = tensor.numel() * tensor.element_size()
    if tensor.dtype not in (torch.bfloat16, torch.float16) or size < SMALL:
        return None
    import zstandard

    planes = tensor.cpu().contiguous().flatten().view(torch.uint8).view(-1, 2).T.contiguous()
    found: bytes = zstandard.ZstdCompressor(level=3).compress(view_of(planes))
    return found if len(found) <= PAYS * size else None


def _unpacked(flat: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    check_compression("zstd")
    import zstandard

    size = 2 * math.prod(shape)
    try:
        if (content := zstandard.frame_content_size(view_of(flat))) != size:
            raise ValueError(f"a tensor of shape {list(shape)} is packed from {content} bytes, not from {size}")
        planes = bytearray(zstandard.ZstdDecompressor().decompress(view_of(flat), max_output_size=size))
    except zstandard.ZstdError as error:
        raise ValueError(f"a tensor of shape {list(shape)} cannot be unpacked: {error}") from error
    return torch.frombuffer(planes, dtype=torch.uint8).view(2, -1).T.contiguous().flatten().view(dtype).view(shape)


def _sync_folder(folder: Path) -> None:
    """Let a new name in a folder outlive a crash, where folders can be opened."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _digest_field(digest: str) -> bytes:
    return f'"sha256":"{digest}"'.encode()


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
