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
import math
import mmap
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpress.atomic import replacing
from kvpress.cache.header import ALIGN, MOST_HEADER, Header, Place, header_of, opened

CHUNK = 2**22
"""Bytes per copy."""
PAYS = 0.9
"""Maximum compressed share of the bytes of a tensor; above it, the tensor is written uncompressed."""
SMALL = 4096
"""Minimum bytes of a tensor for compression."""
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
                kind = _NAMES[tensor.dtype], tuple(tensor.shape)
                size = tensor.numel() * tensor.element_size() if compressed is None else len(compressed)
                place = Place(*kind, end, end + size)
                if compressed is not None:
                    place = Place("U8", (size,), end, end + size, packed=kind)
                self.header.places[name] = place
                parts.append(tensor if compressed is None else compressed)
                end += size
            if gap := -end % ALIGN:
                self.header.places[f"padding.{block.name}"] = Place("U8", (gap,), end, end + gap)
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
                flat.view(TYPES[place.dtype]).view(place.shape)
                if flat.numel()
                else torch.empty(place.shape, dtype=TYPES[place.dtype])
            )
        kind, shape = place.packed
        return _unpacked(flat, TYPES[kind], shape)


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
    with replacing(path) as file:
        file.write(head)
        for number in range(len(writing.header.blocks)):
            digest = hashlib.sha256()
            for chunk in writing.chunks(number):
                digest.update(chunk)
                file.write(chunk)
            writing.header.digests.append(digest.hexdigest())
        file.seek(0)
        file.write(writing.header.to_bytes())
    return size


def open_file(path: str | Path, verify: bool = True) -> tuple[Header, Tensors]:
    """Map a file into memory; with `verify`, compare its digests first, which reads the whole file.

    Tensors refer to the mapped file and are copied on write. Do not overwrite the file in place while they are in use;
    replacing or removing it is safe.

    Raises:
        OSError, ValueError: as `read_header`, or a digest differs.
    """
    with opened(Path(path)) as file:
        header, begin = header_of(file, Path(path))
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
