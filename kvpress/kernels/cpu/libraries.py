# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels as files: what each is built from, what it is called, and how it is compiled.

A library is one C++ source at one instruction-set level. Its file, ``<level>/<source>-<key>-<compiler>-<contents>.so``, is
named after everything that can change it (sources and flags, the compiler) and after what it contains: an upgrade makes a new
file, and one of other sources, or a damaged one, is never taken for it. Wheels and cache folders hold the same files.

This module needs the standard library only: the hook that builds wheels (``hatch_build.py``) runs without torch.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvpress import env

logger = logging.getLogger("kvpress")

SOURCES = Path(__file__).parent
PACKAGED = SOURCES / "lib"
"""Where a wheel keeps its libraries."""

PROBE = "probe.cpp"
KERNELS = (
    "decode.cpp",
    "coded.cpp",
    "prefill.cpp",
    "mass.cpp",
    "scores.cpp",
    "tile_mass.cpp",
    "quantise.cpp",
    "select.cpp",
)
"""The sources of one level, those that take longest to compile first."""

# -w: GCC 12 warns about uninitialised variables inside its own AVX-512 headers.
COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-math-errno", "-ffp-contract=fast", "-w")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
VNNI = (*AVX512, "-mavx512vnni")
VBMI = (*VNNI, "-mavx512vbmi")

ARM_LEVELS: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "neon_dot": ("-march=armv8.2-a+dotprod",),  # Apple M1, Graviton 2, Ampere, and later
}
X86_LEVELS: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "avx2": AVX2,  # Zen 1 to 3, Haswell and later
    "avx2_vnni": (*AVX2, "-mavxvnni"),  # Alder Lake and all later desktop processors of Intel; not Zen 4
    "avx512": AVX512,  # Skylake servers
    "avx512_vnni": VNNI,  # Cascade Lake, Cooper Lake
    "avx512_vbmi": VBMI,  # Ice Lake
    "avx512_bf16": (*VBMI, "-mavx512bf16"),  # Sapphire Rapids, Zen 4 and later
}
LEVELS = ARM_LEVELS if platform.machine().lower() in ("aarch64", "arm64") else X86_LEVELS
"""Compiler flags of each instruction-set level, slowest first; the order is that of ``probe.cpp``.

A level contains those whose flags are among its own: not all slower ones, because `avx2_vnni` is no part of AVX-512.
"""

ASKED = {
    "neon_dot": "__ARM_FEATURE_DOTPROD",
    "avx2": "__AVX2__",
    "avx2_vnni": "__AVXVNNI__",
    "avx512": "__AVX512F__",
    "avx512_vnni": "__AVX512VNNI__",
    "avx512_vbmi": "__AVX512VBMI__",
    "avx512_bf16": "__AVX512BF16__",
}
"""The macro with which sources ask for what a level adds."""


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here; the message says why."""


class CompilerError(BuildError):
    """The compiler refuses flags or sources."""


@dataclass(frozen=True)
class Library:
    """One source compiled for one instruction-set level."""

    level: str
    source: str

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags of the compiler, without those of OpenMP."""
        return (*COMMON_FLAGS, *LEVELS[self.level])

    @property
    def name(self) -> str:
        """The source's name and a digest of what the library is made of: source, headers, flags, kind of machine."""
        key = hashlib.sha256(repr((sys.platform, platform.machine(), self.flags)).encode())
        for file in _included(self.source):
            key.update(f"{file} {_text(file)}".encode())
        return f"{Path(self.source).stem}-{key.hexdigest()[:20]}"

    def find(self, folder: Path, compiler: str = "*") -> Path | None:
        """Return the file of this library in a folder if its contents are those it was built with, else None.

        Args:
            folder: a wheel's or a cache's.
            compiler: key of the compiler that must have built it, see `compiler_key`; any by default.
        """
        for path in sorted((folder / self.level).glob(f"{self.name}-{compiler}-*.so")):
            if path.stem.endswith(f"-{digest(path)}"):
                return path
            say_once(f"{path} is damaged and is not loaded")  # it could end the process
        return None

    def compile(self, folder: Path) -> Path:
        """Compile into a folder that exists, and return the file.

        Raises:
            BuildError: it does not compile.
            OSError: the folder cannot be written to.
        """
        target = folder / self.level
        target.mkdir(mode=0o700, exist_ok=True)
        # A private file renamed into place: another process sees either nothing or a finished library.
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            part, built = Path(scratch) / "part.o", Path(scratch) / "built.so"
            openmp = _openmp()
            _run([compiler(), *self.flags, *openmp.compiling, "-c", str(SOURCES / self.source), "-o", str(part)])
            _run([compiler(), *self.flags, *openmp.linking, str(part), "-o", str(built)])
            if not built.is_file():
                raise CompilerError(f"{compiler()} does not report an error, and made nothing")
            made = target / f"{self.name}-{compiler_key()}-{digest(built)}.so"
            os.replace(built, made)
        for damaged in target.glob(f"{self.name}-{compiler_key()}-*.so"):
            if damaged != made:
                damaged.unlink(missing_ok=True)
        return made


def library(level: str, source: str) -> Library:
    """Return the library of a source for a level: that of a level it contains where the source asks for nothing beyond it."""
    text = "".join(map(_text, _included(source)))
    contained = [name for name, flags in LEVELS.items() if set(flags) <= set(LEVELS[level])]
    return Library(next(name for name in reversed(contained) if not LEVELS[name] or ASKED[name] in text), source)


def compile_all(libraries: Iterable[Library], folder: Path) -> list[Path]:
    """Compile libraries into a folder, as many at a time as the machine has processors; raises as `Library.compile`."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda library: library.compile(folder), libraries))


def package(levels: Sequence[str], folder: Path) -> dict[str, CompilerError]:
    """Compile what a wheel brings into a folder.

    Args:
        levels: instruction-set levels, of `LEVELS`; at least one.
        folder: where to; it exists.

    Returns:
        The levels that the compiler refuses, such as an old one those of newer processors, and why. The wheel lacks them.

    Raises:
        BuildError: there is no compiler, or none of the levels compiles.
    """
    refused: dict[Library, CompilerError] = {}

    def attempt(wanted: Library) -> None:
        try:
            wanted.compile(folder)
        except CompilerError as error:
            refused[wanted] = error

    Library("baseline", PROBE).compile(folder)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(attempt, dict.fromkeys(library(level, source) for source in KERNELS for level in levels)))
    lacking = {
        level: refused[wanted]
        for level in levels
        for source in KERNELS
        if (wanted := library(level, source)) in refused
    }
    if len(lacking) == len(levels):
        raise next(iter(lacking.values()))
    return lacking


def levels_named(text: str) -> list[str]:
    """Return the levels that ``KVPRESS_WHEEL_LEVELS`` asks for: ``all``, ``none``, or names with commas between them."""
    names = list(LEVELS) if text == "all" else [] if text == "none" else text.split(",")
    if unknown := [name for name in names if name not in LEVELS]:
        raise ValueError(
            f"KVPRESS_WHEEL_LEVELS={text}: no level {unknown[0]!r}; use all, none, or of {', '.join(LEVELS)}"
        )
    return names


@functools.cache
def compiler() -> str:
    """Path of the C++ compiler: ``$CXX``, else the first of c++, g++ and clang++ on the path."""
    wanted = env.cxx_compiler()
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler found ({wanted or 'c++, g++, clang++'})")


def check_compiler(level: str) -> None:
    """Raise `CompilerError`, in no time, if the compiler does not know the flags of a level."""
    _run([compiler(), *COMMON_FLAGS, *LEVELS[level], "-fsyntax-only", "-x", "c++", os.devnull])


@functools.cache
def _version() -> str:
    return _run([compiler(), "--version"])


@functools.cache
def compiler_key() -> str:
    """Digest of the compiler's name and version: another compiler makes another library."""
    return hashlib.sha256(_version().encode()).hexdigest()[:8]


@dataclass(frozen=True)
class _OpenMP:
    compiling: tuple[str, ...] = ()
    linking: tuple[str, ...] = ()


@functools.cache
def _openmp() -> _OpenMP:
    """Flags for OpenMP, none where the compiler lacks it: the kernels run on one thread then.

    GCC's functions are left open in the library, and found in the runtime that torch has loaded, under whatever name torch
    brings it: so there is one pool of threads, and none needs to be installed. Clang's are not in that runtime.
    """
    with tempfile.TemporaryDirectory() as scratch:
        try:
            _run([compiler(), *COMMON_FLAGS, "-fopenmp", "-x", "c++", os.devnull, "-o", f"{scratch}/empty.so"])
        except CompilerError:
            return _OpenMP()
    return _OpenMP(("-fopenmp",), ("-fopenmp",) if "clang" in _version() else ())


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)  # noqa: S603 - fixed flags
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip()[-500:] or f"exit status {error.returncode}"
        raise CompilerError(f"{command[0]} failed: {said}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error
    return done.stdout


@functools.cache
def _included(source: str) -> tuple[str, ...]:
    """The source and every header of ours that it includes, at whatever depth."""
    found = [source]
    for file in found:
        found += [name for name in re.findall(r'^\s*#include "(.+)"', _text(file), re.MULTILINE) if name not in found]
    return tuple(found)


@functools.cache
def _text(file: str) -> str:
    return (SOURCES / file).read_text(encoding="utf-8")


def digest(path: Path) -> str:
    """Digest of a file's contents, as it stands in a library's name."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


@functools.cache
def say_once(message: str) -> None:
    """Warn, once a process."""
    logger.warning(message)
