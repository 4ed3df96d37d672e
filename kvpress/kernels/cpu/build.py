"""Compile the C++ kernels once per machine with the system compiler and load them through ctypes.

A library is named after everything that can change it (sources, flags, compiler version) and after its contents: an upgrade
builds a new file, and a damaged one is never loaded. Of several processes one compiles while the others wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvpress import env

logger = logging.getLogger("kvpress")

SOURCES = Path(__file__).parent
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
    "avx2": AVX2,  # Zen 1 to 3, Haswell, and all later desktop processors of Intel
    "avx512": AVX512,  # Skylake servers
    "avx512_vnni": VNNI,  # Cascade Lake, Cooper Lake
    "avx512_vbmi": VBMI,  # Ice Lake
    "avx512_bf16": (*VBMI, "-mavx512bf16"),  # Sapphire Rapids, Zen 4 and later
}
LEVELS = ARM_LEVELS if platform.machine().lower() in ("aarch64", "arm64") else X86_LEVELS
"""Compiler flags of each instruction-set level, slowest first; the order is that of ``probe.cpp``."""


class BuildError(RuntimeError):
    """The kernels cannot be compiled or loaded here; the message says why."""


@functools.cache
def compiler() -> str:
    """Path of the C++ compiler: ``$CXX``, else the first of c++, g++ and clang++ on the path."""
    wanted = env.cxx_compiler()
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        if path := shutil.which(name):
            return path
    raise BuildError(f"no C++ compiler found ({wanted or 'c++, g++, clang++'})")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)  # noqa: S603 - fixed flags
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{' '.join(command[:2])} failed: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error
    return done.stdout


def _library(source: str, flags: tuple[str, ...], folder: Path) -> Path:
    """Path of the compiled shared library in a folder, built where it has none that is whole.

    Raises:
        BuildError: it does not compile.
        OSError: the folder cannot be used.
    """
    flags = (*COMMON_FLAGS, *flags)
    key = hashlib.sha256(repr((_run([compiler(), "--version"]), platform.machine(), source, flags)).encode())
    for file in [*sorted(SOURCES.glob("*.h")), SOURCES / source]:
        key.update(file.read_bytes())
    name = f"{Path(source).stem}-{key.hexdigest()[:20]}"
    if found := _whole(folder, name):
        return found
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_owner(folder)
    with _alone_in(folder):
        if found := _whole(folder, name):  # another process built it meanwhile
            return found
        # A private file renamed into place: another process sees either nothing or a finished library.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / "built.so"
            _run([compiler(), *flags, str(SOURCES / source), "-o", str(built)])
            target = folder / f"{name}-{_digest(built)}.so"
            os.replace(built, target)
    return target


def _whole(folder: Path, name: str) -> Path | None:
    """Return the library of that name whose contents are those it was built with; damaged ones would end the process."""
    for path in sorted(folder.glob(f"{name}-*.so")):
        _check_owner(folder)
        if path.stem.endswith(f"-{_digest(path)}"):
            return path
        logger.warning("%s is damaged and is compiled again", path)
        with contextlib.suppress(OSError):
            path.unlink()
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _check_owner(folder: Path) -> None:
    """Refuse a folder that others could put libraries into: what lies there is run."""
    state = folder.stat()
    if state.st_uid not in (env.user(), 0) or state.st_mode & stat.S_IWOTH:
        raise PermissionError(f"{folder} belongs to another user, or others can write to it")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process builds in a folder. The lock ends with its process; file systems without locks do without."""
    try:
        import fcntl
    except ImportError:  # Windows has no such locks
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _load(source: str, flags: tuple[str, ...]) -> ctypes.CDLL:
    """Load a library from the first folder that can hold it and whose files may be run."""
    failed: list[str] = []
    for folder in env.cache_dirs():
        try:
            loaded = ctypes.CDLL(str(_library(source, flags, folder)))
        except OSError as error:
            failed.append(f"{folder} ({error})")
            continue
        if failed:
            _say_once(
                f"compiled kernels are kept in {folder}, because of {failed[0]}; set XDG_CACHE_HOME to another folder"
            )
        return loaded
    raise BuildError(
        f"no folder for compiled kernels can be used: {', '.join(failed)}; set XDG_CACHE_HOME to one that can"
    )


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)


@functools.cache
def supported_levels() -> tuple[str, ...]:
    """Instruction-set levels this processor can run, slowest first."""
    return tuple(LEVELS)[: _load("probe.cpp", ()).kvpress_level() + 1]


@functools.cache
def best_level() -> str:
    """The level to run: the one that ``KVPRESS_CPU_LEVEL`` names, else the fastest that this processor has.

    Raises:
        ValueError: the level that is asked for is unknown, or one that this processor lacks.
    """
    levels, wanted = supported_levels(), env.cpu_level()
    if wanted is None:
        return levels[-1]
    if wanted not in levels:
        why = "this processor lacks it" if wanted in LEVELS else "there is no such level"
        raise ValueError(f"KVPRESS_CPU_LEVEL={wanted}: {why}; use one of {', '.join(levels)}, or unset it")
    return wanted


@functools.cache
def load(level: str, source: str = "decode.cpp") -> ctypes.CDLL:
    """The kernels of one source compiled for one level, with OpenMP where the compiler has it."""
    try:
        return _load(source, (*LEVELS[level], "-fopenmp"))
    except BuildError:
        return _load(source, (*LEVELS[level], "-pthread"))
