# SPDX-License-Identifier: Apache-2.0
"""Load the C++ kernels through ctypes: from the installed package, or compiled on first use with the system's compiler.

Compiled kernels are stored in a cache folder of the user. Of several processes, one compiles while the others wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvpress import env
from kvpress.kernels.cpu import libraries
from kvpress.kernels.cpu.libraries import KERNELS, LEVELS, PROBE, BuildError, Library, library, warn_once


class FolderError(BuildError):
    """No folder can be used for compiled kernels."""


@functools.cache
def supported_levels() -> tuple[str, ...]:
    """Return the instruction-set levels that this processor can run, slowest first.

    Raises:
        BuildError: the library that probes the processor is neither there nor can be compiled.
    """
    (probe,) = _load([Library("baseline", PROBE)])
    bits = probe.kvpress_levels()
    return tuple(level for i, level in enumerate(LEVELS) if bits >> i & 1)


def requested_level() -> str | None:
    """Return the level that ``KVPRESS_CPU_LEVEL`` names, None if it is not set.

    Raises:
        ValueError: the level does not exist, or this processor lacks it.
    """
    name = env.cpu_level()
    if name is None:
        return None
    try:
        levels = supported_levels()
    except BuildError:
        levels = tuple(LEVELS)  # without the probe, the levels of this processor are unknown
    if name not in levels:
        why = "this processor lacks it" if name in LEVELS else "there is no such level"
        raise ValueError(f"KVPRESS_CPU_LEVEL={name}: {why}; use one of {', '.join(levels)}, or unset it")
    return name


@functools.cache
def best_level() -> str:
    """Load the kernels of the level that ``KVPRESS_CPU_LEVEL`` names, else of the processor's fastest, and return the level.

    Without ``KVPRESS_CPU_LEVEL``, a level that is not in the wheel and that the compiler does not support is replaced by the
    next slower one, with a warning.

    Raises:
        ValueError: ``KVPRESS_CPU_LEVEL`` names a level that cannot run here, see `requested_level`.
        BuildError: the kernels can neither be found nor compiled.
    """
    configured, levels = requested_level(), supported_levels()
    refused: dict[str, BuildError] = {}
    for level in [configured] if configured else reversed(levels):
        try:
            _load([library(level, source) for source in KERNELS])
        except FolderError:
            raise
        except BuildError as error:
            refused[level] = error
            continue
        if refused:
            warn_once(f"CPU kernels for {levels[-1]} are not available, those for {level} run: {refused[levels[-1]]}")
        return level
    raise next(iter(refused.values()))


@functools.cache
def load(level: str, source: str = "decode.cpp") -> ctypes.CDLL:
    """Load the kernels of one source at one level; raises `BuildError` if they can neither be found nor compiled."""
    (kernels,) = _load([library(level, source)])
    return kernels


def find_origin(item: Library) -> str | None:
    """Return the origin of a library's file, `the wheel` or `the cache folder`; None if it has to be compiled."""
    if item.find(libraries.PACKAGED):
        return "the wheel"
    try:
        key = libraries.compiler_key()
    except BuildError:
        return None
    return "the cache folder" if any(item.find(folder, key) for folder in env.cache_dirs()) else None


def _load(items: Sequence[Library]) -> list[ctypes.CDLL]:
    """Load libraries, compiling those that are neither in the package nor in a cache folder."""
    loaded = {item: kernels for item in items if (kernels := _packaged(item))}
    if missing := [item for item in items if item not in loaded]:
        loaded |= zip(missing, _from_cache(missing), strict=True)
    return [loaded[item] for item in items]


def _packaged(item: Library) -> ctypes.CDLL | None:
    """Load a library from the installed package, else return None.

    The owner of the folder is not checked: a user who can write there can also change this file.
    """
    path = item.find(libraries.PACKAGED)
    try:
        return _open(path) if path else None
    except OSError as error:
        warn_once(f"{path} cannot be loaded here, so it is compiled: {error}")
        return None


def _from_cache(missing: Sequence[Library]) -> list[ctypes.CDLL]:
    """Load libraries from the first cache folder that can be used, compiling those that it lacks."""
    failed: list[str] = []
    for folder in env.cache_dirs():
        try:
            opened = [_open(path) for path in compiled(missing, folder)]
        except OSError as error:
            failed.append(f"{folder} ({error})")
            continue
        if failed:
            warn_once(
                f"compiled kernels are kept in {folder}, because of {failed[0]}; set XDG_CACHE_HOME to another folder"
            )
        return opened
    raise FolderError(
        f"no folder for compiled kernels can be used: {', '.join(failed)}; set XDG_CACHE_HOME to one that can"
    )


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        # OpenMP functions usually resolve to the runtime of torch; a torch without OpenMP needs that of the system.
        with contextlib.suppress(OSError):
            ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))


def compiled(items: Sequence[Library], folder: Path) -> list[Path]:
    """Return the files of libraries in a cache folder, compiling those that are missing or damaged.

    Raises:
        BuildError: a library does not compile.
        OSError: the folder cannot be used.
    """
    key = libraries.compiler_key()
    folders = [folder, *(folder / level for level in sorted({item.level for item in items}))]

    def find() -> dict[Library, Path]:
        for path in folders:
            if path.exists():
                _check_owner(path)
        return {item: file for item in items if (file := item.find(folder, key))}

    files = find()
    if len(files) < len(items):
        for level in {item.level for item in items if item not in files}:
            libraries.check_compiler(level)
        for path in folders:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as locks:
            for path in folders[1:]:
                locks.enter_context(_alone_in(path))
            files = find()  # another process may have compiled some meanwhile
            missing = [item for item in items if item not in files]
            with _announced(missing, folder):
                files |= zip(missing, libraries.compile_all(missing, folder), strict=True)
    return [files[item] for item in items]


@contextlib.contextmanager
def _announced(missing: list[Library], folder: Path) -> Iterator[None]:
    """Log the libraries that are compiled, and the time; the probe compiles too fast to be logged."""
    names = ", ".join(f"{Path(item.source).stem} for {item.level}" for item in missing if item.source != PROBE)
    started = time.monotonic()
    if names:
        libraries.logger.warning("compiling CPU kernels with %s, once: %s", libraries.compiler(), names)
    yield
    if names:
        libraries.logger.warning("compiled in %.0f s, kept in %s", time.monotonic() - started, folder)


def _check_owner(folder: Path) -> None:
    """Refuse a folder that another user could write libraries to: they would be run."""
    state = folder.stat()
    if state.st_uid not in (env.user(), 0) or state.st_mode & stat.S_IWOTH:
        raise PermissionError(f"{folder} belongs to another user, or others can write to it")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process compiles into a folder; on file systems without locks, do not wait.

    The lock ends with its process. The folder itself is locked, so that it holds libraries only; `filelock` would add a file.
    """
    try:
        import fcntl
    except ImportError:  # Windows has no such locks
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            warn_once(f"waiting for another process that compiles CPU kernels in {folder.parent}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
    finally:
        os.close(handle)
