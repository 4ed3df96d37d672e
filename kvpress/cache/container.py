# SPDX-License-Identifier: Apache-2.0
"""File format of caches: safetensors in blocks, each block with its digest.

    8 bytes    length of the header
    header     JSON of safetensors: name, type, shape and offsets of every tensor; other data as text in `__metadata__`
    data       the tensors in the order of the header: one block per layer, aligned to 64 bytes

Any reader of safetensors reads these files. The writer of safetensors is not used, since it sorts all tensors by type and
makes a second copy of them: layers must be in order, so that a transfer can begin with the first. The digests of the header
and of all blocks are compared before any data are used. A stream has the same bytes, and after every block its digest.
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
"""Maximum length of a header that safetensors reads."""
CHUNK = 2**22
"""Bytes per copy."""
PAYS = 0.9
"""Maximum compressed share of the bytes of a tensor; above it, the tensor is written uncompressed."""
SMALL = 4096
"""Minimum bytes of a tensor for compression."""
NO_DIGEST = "0" * 64
MOST_DIMENSIONS = 8
"""Maximum dimensions of a tensor in a file."""
DIGEST = 32
"""Bytes of a digest."""

TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in TYPES.items()}


@dataclass(frozen=True)
class TensorBlock:
    """Tensors that are written together."""

    name: str
    """Name of the block."""
    tensors: Mapping[str, Tensor]
    """Tensors by name."""


@dataclass(frozen=True)
class Place:
    """Location of a tensor in the data."""

    dtype: torch.dtype
    """Stored dtype, uint8 for compressed tensors."""
    shape: tuple[int, ...]
    """Stored shape."""
    start: int
    """First byte."""
    end: int
    """One past the last byte."""
    packed: tuple[torch.dtype, tuple[int, ...]] | None = None
    """Dtype and shape after decompression; None for uncompressed tensors."""


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


class Writing:
    """Layout of blocks for writing: `header`, and the bytes of each block."""

    def __init__(self, about: dict[str, Any], blocks: Sequence[TensorBlock], compress: str | None = None) -> None:
        check_compression(compress)
        self.header = Header(about)
        self._parts: list[list[Tensor | bytes]] = []
        end = 0
        for block in blocks:
            start, parts = end, []
            entries = [(name, tensor, _packed(tensor) if compress else None) for name, tensor in block.tensors.items()]
            # Wider types first and compressed tensors last, so that each is aligned to its item size.
            entries.sort(key=lambda item: (item[2] is not None, -item[1].element_size()))
            for name, tensor, compressed in entries:
                kind = tensor.dtype, tuple(tensor.shape)
                size = tensor.numel() * tensor.element_size() if compressed is None else len(compressed)
                place = Place(*kind, end, end + size)
                if compressed is not None:
                    place = Place(torch.uint8, (size,), end, end + size, packed=kind)
                self.header.places[name] = place
                parts.append(tensor if compressed is None else compressed)
                end += size
            if gap := -end % ALIGN:
                self.header.places[f"padding.{block.name}"] = Place(torch.uint8, (gap,), end, end + gap)
                parts.append(bytes(gap))
                end += gap
            self._parts.append(parts)
            self.header.blocks.append((block.name, start, end))

    def chunks(self, number: int) -> Iterator[memoryview]:
        """Yield the bytes of a block, some megabytes at a time."""
        for part in self._parts[number]:
            yield from [memoryview(part)] if isinstance(part, bytes) else _pieces(part)


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order; copy one piece at a time if it is on a device or not contiguous."""
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
    """Tensors of a file by name, read at access; `read(place)` returns the bytes of one, uint8."""

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
    """Write a file atomically, so that a crash or a full disk leaves the old file or none; return its bytes.

    Raises:
        OSError: the folder cannot be written to, the path is a folder, or the disk is full.
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
    """Read the header of a file; return it with the offset of the data.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        ValueError: the file is cut off, damaged, has another version, or is not a cache.
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


def open_file(path: str | Path, verify: bool = True) -> tuple[Header, Tensors]:
    """Map a file into memory; with `verify`, compare its digests first, which reads the whole file.

    Tensors refer to the mapped file and are copied on write. Do not overwrite the file in place while they are in use;
    replacing or removing it is safe.

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
                raise ValueError(f"{path} is damaged: block {name!r} does not match its digest")
        view.release()

    def read_place(place: Place) -> Tensor:
        count = place.end - place.start
        if not count:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mapped, dtype=torch.uint8, count=count, offset=begin + place.start)

    return header, Tensors(header, read_place)


def send_blocks(writing: Writing, write: Callable[[memoryview], None]) -> int:
    """Write the file to a stream, with the binary digest after each block; return the number of bytes."""
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
    """Read the header of a stream; `fill` fills a view with the next bytes.

    Raises:
        ValueError: the stream is not a cache, or the cache is larger than `limit`.
    """
    first = bytearray(8)
    fill(memoryview(first))
    length = int.from_bytes(first, "little")
    if not 2 <= length <= MOST_HEADER:
        raise ValueError("the stream is not a cache of kvpress: it has no header of safetensors")
    if limit is not None and length > limit:
        raise ValueError(f"the header of the cache alone takes {length} bytes, and at most {limit} are admitted")
    text = bytearray(length)
    fill(memoryview(text))
    try:
        header = Header.from_bytes(bytes(text))
    except ValueError as error:
        raise ValueError(f"the stream {error}") from error
    if limit is not None and header.held_bytes > limit:
        raise ValueError(f"the cache takes {header.held_bytes} bytes, and at most {limit} are admitted (`limit`)")
    return header


def receive_block(header: Header, number: int, fill: Callable[[memoryview], None]) -> dict[int, Tensor]:
    """Read a block of a stream; return the bytes of its tensors by their offset.

    Raises:
        ValueError: the digest differs.
    """
    name = header.blocks[number][0]
    tensors, digest = {}, hashlib.sha256()
    for place in header.contents[number]:
        if place.start < place.end:
            tensors[place.start] = _room_for(place)
            view = view_of(tensors[place.start])
            fill(view)
            digest.update(view)
    expected_digest = bytearray(DIGEST)
    fill(memoryview(expected_digest))
    if digest.digest() != expected_digest:
        raise ValueError(f"block {name!r} of the cache was damaged on its way")
    return tensors


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
    """Check a compression method.

    Raises:
        ValueError: the method is unknown.
        ImportError: its package is not installed.
    """
    if compress not in (None, "zstd"):
        raise ValueError(f"compress must be None or 'zstd', got {compress!r}")
    if compress == "zstd" and find_spec("zstandard") is None:
        raise ImportError("compress='zstd' needs the package zstandard: pip install 'kvpress-toolkit[zstd]'")


def _packed(tensor: Tensor) -> bytes | None:
    """Compress 16-bit numbers, all low bytes before all high bytes; return None where the result is not smaller."""
    size = tensor.numel() * tensor.element_size()
    if tensor.dtype not in (torch.bfloat16, torch.float16) or size < SMALL:
        return None
    import zstandard

    planes = tensor.cpu().contiguous().flatten().view(torch.uint8).view(-1, 2).T.contiguous()
    compressed: bytes = zstandard.ZstdCompressor(level=3).compress(view_of(planes))
    return compressed if len(compressed) <= PAYS * size else None


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
    """Flush a folder, so that a new name in it survives a crash, where the system can open folders."""
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
