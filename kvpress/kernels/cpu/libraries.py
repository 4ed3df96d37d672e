# SPDX-License-Identifier: Apache-2.0
"""Files of compiled kernels: their sources, names and compilation.

A library is one C++ source compiled for one instruction-set level. Its file name,
``<level>/<source>-<key>-<compiler>-<contents>.so``, has a digest of sources and flags, one of the compiler, and one of the
contents of the file. An upgrade therefore makes a new file, and an outdated or damaged one is never loaded. Wheels and cache
folders hold the same files.

This module imports the standard library only: the hook that builds wheels (``hatch_build.py``) runs without torch.
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
"""Folder of the libraries in a wheel."""

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
"""Sources of one level, the slowest to compile first."""

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
"""Compiler flags of each instruction-set level, slowest first, in the order of ``probe.cpp``.

A level contains another if it has all its flags. It need not contain all slower levels: `avx2_vnni` is not part of AVX-512.
"""

MACROS = {
    "neon_dot": "__ARM_FEATURE_DOTPROD",
    "avx2": "__AVX2__",
    "avx2_vnni": "__AVXVNNI__",
    "avx512": "__AVX512F__",
    "avx512_vnni": "__AVX512VNNI__",
    "avx512_vbmi": "__AVX512VBMI__",
    "avx512_bf16": "__AVX512BF16__",
}
"""Macro that a source tests to use the instructions that a level adds."""


class BuildError(RuntimeError):
    """Kernels cannot be compiled or loaded; the message has the reason."""


class CompilerError(BuildError):
    """Compiler error for flags or sources."""


@dataclass(frozen=True)
class Library:
    """One source compiled for one instruction-set level."""

    level: str
    """Instruction-set level, of `LEVELS`."""
    source: str
    """File name of the C++ source."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Compiler flags, without those of OpenMP."""
        return (*COMMON_FLAGS, *LEVELS[self.level])

    @property
    def name(self) -> str:
        """Name of the source and a digest of source, headers, flags, operating system and machine type."""
        key = hashlib.sha256(repr((sys.platform, platform.machine(), self.flags)).encode())
        for file in _included(self.source):
            key.update(f"{file} {_text(file)}".encode())
        return f"{Path(self.source).stem}-{key.hexdigest()[:20]}"

    def find(self, folder: Path, compiler: str = "*") -> Path | None:
        """Return the intact file of this library in a folder, else None.

        Args:
            folder: folder of a wheel or a cache.
            compiler: key of the compiler that must have built it, see `compiler_key`; any by default.
        """
        for path in sorted((folder / self.level).glob(f"{self.name}-{compiler}-*.so")):
            if path.stem.endswith(f"-{digest(path)}"):
                return path
            warn_once(f"{path} is damaged and is not loaded")  # loading it could crash the process
        return None

    def compile(self, folder: Path) -> Path:
        """Compile into an existing folder, and return the file.

        Raises:
            BuildError: the library does not compile.
            OSError: the folder cannot be written to.
        """
        target = folder / self.level
        target.mkdir(mode=0o700, exist_ok=True)
        # A temporary file is renamed when it is complete, so that another process never sees half a library.
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            compiled, built = Path(scratch) / "compiled.o", Path(scratch) / "built.so"
            openmp = _openmp()
            _run([compiler(), *self.flags, *openmp.compiling, "-c", str(SOURCES / self.source), "-o", str(compiled)])
            _run([compiler(), *self.flags, *openmp.linking, str(compiled), "-o", str(built)])
            if not built.is_file():
                raise CompilerError(f"{compiler()} reports no error, but wrote no file")
            path = target / f"{self.name}-{compiler_key()}-{digest(built)}.so"
            os.replace(built, path)
        for damaged in target.glob(f"{self.name}-{compiler_key()}-*.so"):
            if damaged != path:
                damaged.unlink(missing_ok=True)
        return path


def library(level: str, source: str) -> Library:
    """Return the library of a source for a level: that of the fastest level it contains whose macro the source tests."""
    text = "".join(map(_text, _included(source)))
    contained = [name for name, flags in LEVELS.items() if set(flags) <= set(LEVELS[level])]
    return Library(next(name for name in reversed(contained) if not LEVELS[name] or MACROS[name] in text), source)


def compile_all(libraries: Iterable[Library], folder: Path) -> list[Path]:
    """Compile libraries into a folder in parallel, one per processor; raises as `Library.compile`."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda library: library.compile(folder), libraries))


def package(levels: Sequence[str], folder: Path) -> dict[str, CompilerError]:
    """Compile the libraries of a wheel into a folder.

    Args:
        levels: instruction-set levels, of `LEVELS`; at least one.
        folder: existing folder for the libraries.

    Returns:
        Levels that do not compile, and therefore are not in the wheel, with the error; an old compiler lacks the newest levels.

    Raises:
        BuildError: there is no compiler, or none of the levels compiles.
    """
    refused: dict[Library, CompilerError] = {}

    def attempt(item: Library) -> None:
        try:
            item.compile(folder)
        except CompilerError as error:
            refused[item] = error

    Library("baseline", PROBE).compile(folder)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(attempt, dict.fromkeys(library(level, source) for source in KERNELS for level in levels)))
    lacking = {
        level: refused[item] for level in levels for source in KERNELS if (item := library(level, source)) in refused
    }
    if len(lacking) == len(levels):
        raise next(iter(lacking.values()))
    return lacking


def levels_named(text: str) -> list[str]:
    """Return the levels in the value of ``KVPRESS_WHEEL_LEVELS``: ``all``, ``none``, or names separated by commas."""
    names = list(LEVELS) if text == "all" else [] if text == "none" else text.split(",")
    if unknown := [name for name in names if name not in LEVELS]:
        raise ValueError(
            f"KVPRESS_WHEEL_LEVELS={text}: no level {unknown[0]!r}; use all, none, or some of {', '.join(LEVELS)}"
        )
    return names


@functools.cache
def compiler() -> str:
    """Return the path of the C++ compiler: ``$CXX``, else the first of c++, g++ and clang++ in ``PATH``."""
    configured = env.cxx_compiler()
    for name in [configured] if configured else ["c++", "g++", "clang++"]:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler found ({configured or 'c++, g++, clang++'})")


def check_compiler(level: str) -> None:
    """Raise `CompilerError` if the compiler does not accept the flags of a level; compiles an empty file only."""
    _run([compiler(), *COMMON_FLAGS, *LEVELS[level], "-fsyntax-only", "-x", "c++", os.devnull])


@functools.cache
def _version() -> str:
    return _run([compiler(), "--version"])


@functools.cache
def compiler_key() -> str:
    """Return a digest of the compiler's name and version: another compiler makes another library."""
    return hashlib.sha256(_version().encode()).hexdigest()[:8]


@dataclass(frozen=True)
class _OpenMP:
    """Compiler flags for OpenMP."""

    compiling: tuple[str, ...] = ()
    """Flags that compile a source."""
    linking: tuple[str, ...] = ()
    """Flags that link a library."""


@functools.cache
def _openmp() -> _OpenMP:
    """Return the flags for OpenMP; none where the compiler lacks it, and then kernels run on one thread.

    GCC's OpenMP functions stay undefined in the library and resolve to the runtime that torch has loaded, so that there is one
    thread pool and no runtime to install. Clang's functions are not in that runtime, so clang links its own.
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
        reason = error.stderr.strip()[-500:] or f"exit status {error.returncode}"
        raise CompilerError(f"{command[0]} failed: {reason}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error
    return done.stdout


@functools.cache
def _included(source: str) -> tuple[str, ...]:
    """Return the source and all our headers that it includes, directly or indirectly."""
    files = [source]
    for file in files:
        files += [name for name in re.findall(r'^\s*#include "(.+)"', _text(file), re.MULTILINE) if name not in files]
    return tuple(files)


@functools.cache
def _text(file: str) -> str:
    return (SOURCES / file).read_text(encoding="utf-8")


def digest(path: Path) -> str:
    """Return the digest of a file's contents, which is part of a library's name."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning once per process."""
    logger.warning(message)
