# SPDX-License-Identifier: Apache-2.0
"""Kernels of levels that this machine lacks, run with Debian's emulators where they are installed.

Kernels for ARM are cross-compiled, and qemu runs each call. Kernels for AVX-512 run on any processor with AVX2: SIMDe
implements their intrinsics, see `avx512/immintrin.h`; only the products that are written in assembly have other code there.
Compiling takes minutes, so only `make simulate` does it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from kvpress import env
from kvpress.kernels.cpu import build, launch, libraries
from kvpress.kernels.formats.fields import packed
from kvpress.kernels.formats.operand import Rows

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SOURCES = ("decode", "coded", "mass", "prefill", "quantise", "scores", "select", "tile_mass")
LEVEL = "neon_dot"
AVX512 = {"avx512": 1, "avx512_vnni": 2, "avx512_bf16": 4}
"""Levels that SIMDe runs, and their number in the header; `avx512_vbmi` has no code that the last one lacks."""

BROKEN: dict[Path, subprocess.SubprocessError] = {}
"""Programs that could not be built in this process."""

missing = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
"""Missing tools for kernels for ARM; Debian has them as g++-aarch64-linux-gnu and qemu-user."""


def simulated() -> tuple[str, ...]:
    """Return the levels with AVX-512 that this processor lacks and SIMDe runs, where `make simulate` enables them."""
    native = build.supported_levels() if launch.level() else ()
    able = "SIMULATE" in os.environ and "avx2" in native
    return tuple(level for level in AVX512 if able and level not in native)


@functools.cache
def library(level: str) -> ctypes.CDLL:
    """Compile the kernels of a level for SIMDe, once for all processes, and load them."""
    shim = Path(__file__).with_name("avx512")
    flags = [
        *libraries.COMMON_FLAGS,
        *libraries.AVX2,
        "-O1",
        "-Wno-psabi",
        f"-DKVPRESS_EMULATED={AVX512[level]}",
        f"-I{shim}",
    ]
    return ctypes.CDLL(str(built([libraries.compiler(), *flags], [], [shim / "immintrin.h"])))


@functools.cache
def runner() -> Path:
    """Compile the kernels and `runner.cpp` into one program for ARM, once for all processes."""
    flags = [flag for flag in (*libraries.COMMON_FLAGS, *libraries.ARM_LEVELS[LEVEL], "-static") if flag != "-shared"]
    return built([COMPILER, *flags], [Path(__file__).with_name("runner.cpp")], [])


def built(command: Sequence[str], sources: Sequence[Path], headers: Sequence[Path]) -> Path:
    """Compile all kernels and some more sources into a program, unless that exists; return its path."""
    files = [*sources, *(libraries.SOURCES / f"{name}.cpp" for name in SOURCES)]
    key = hashlib.sha256(" ".join(command).encode())
    for file in [*files, *headers, *sorted(libraries.SOURCES.glob("*.h"))]:
        key.update(file.read_bytes())
    program = env.cache_dirs()[0] / f"emulated-{key.hexdigest()[:20]}"
    program.parent.mkdir(parents=True, exist_ok=True)
    if program in BROKEN:
        raise BROKEN[program]  # compiling takes minutes, so other tests do not try it again
    with FileLock(f"{program}.lock"):
        if program.exists():
            return program
        with tempfile.TemporaryDirectory(dir=program.parent) as scratch:
            compiled = Path(scratch) / program.name
            try:
                subprocess.run([*command, *map(str, files), "-o", str(compiled)], check=True, timeout=600)  # noqa: S603 - fixed flags
            except subprocess.SubprocessError as error:
                BROKEN[program] = error
                raise
            compiled.replace(program)
    return program


def run(source: str, entry: str, *fields: Any, stored: Rows | None = None, level: str | None = None) -> int:
    """Replace `kvpress.kernels.cpu.launch.run`, which is called for other levels."""
    if level != LEVEL and level not in SIMULATED:
        return RUN(source, entry, *fields, stored=stored, level=level)
    fields = (*fields, *(() if stored is None else stored.fields()))
    if level in SIMULATED:
        answer: int = library(level)[entry](packed(fields))
        return answer
    storages: dict[int, tuple[int, Any]] = {}
    words, pointers, blob = [], [], bytearray()
    for field in fields:
        pointers.append(isinstance(field, Tensor))
        if not isinstance(field, Tensor):
            words.append(struct.pack("d" if isinstance(field, float) else "q", 0 if field is None else field))
            continue
        storage = field.untyped_storage()
        if storage.data_ptr() not in storages:
            blob += bytes(-len(blob) % 64)
            storages[storage.data_ptr()] = len(blob), storage
            blob += as_bytes(storage).numpy().tobytes()
        words.append(struct.pack("q", storages[storage.data_ptr()][0] + field.data_ptr() - storage.data_ptr()))
    with tempfile.NamedTemporaryFile() as file:
        file.write(struct.pack("qq", len(fields), len(blob)) + b"".join(words))
        file.write(struct.pack(f"{len(fields)}q", *pointers) + blob)
        file.flush()
        subprocess.run([EMULATOR, str(runner()), entry, file.name], check=True, timeout=300)  # noqa: S603 - our program
        file.seek(0)
        output = file.read()
    buffers = output[16 + 16 * len(fields) :]
    for at, storage in storages.values():
        data = bytearray(buffers[at : at + storage.nbytes()])
        as_bytes(storage).copy_(torch.frombuffer(data, dtype=torch.uint8) if data else torch.tensor([]))
    result: int = struct.unpack_from("q", output)[0]
    return result


def as_bytes(storage: Any) -> Tensor:
    """View a storage as bytes."""
    return torch.tensor([], dtype=torch.uint8).set_(storage)


RUN = launch.run
SIMULATED = simulated()
