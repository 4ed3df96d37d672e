# SPDX-License-Identifier: Apache-2.0
"""Load the C++ kernels through ctypes: from the installed package, or compiled on first use with the system's compiler.

Compiled ones are kept in a folder of the user's own. Of several processes one compiles while the others wait.
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
from kvpress.kernels.cpu.libraries import KERNELS, LEVELS, PROBE, BuildError, Library, library, say_once


class FolderError(BuildError):
    """No folder can hold compiled kernels."""


@functools.cache
def supported_levels() -> tuple[str, ...]:
    """Instruction-set levels this processor can run, slowest first.

    Raises:
        BuildError: there is neither a library nor a compiler that could tell.
    """
    (probe,) = _load([Library("baseline", PROBE)])
    bits = probe.kvpress_levels()
    return tuple(level for i, level in enumerate(LEVELS) if bits >> i & 1)


def asked_level() -> str | None:
    """The level that ``KVPRESS_CPU_LEVEL`` names, if any.

    Raises:
        ValueError: it is unknown, or one that this processor lacks.
    """
    wanted = env.cpu_level()
    if wanted is None:
        return None
    try:
        levels = supported_levels()
    except BuildError:
        levels = tuple(LEVELS)  # which of them the processor has nobody can tell
    if wanted not in levels:
        why = "this processor lacks it" if wanted in LEVELS else "there is no such level"
        raise ValueError(f"KVPRESS_CPU_LEVEL={wanted}: {why}; use one of {', '.join(levels)}, or unset it")
    return wanted


@functools.cache
def best_level() -> str:
    """The level to run, with its kernels ready: the one that ``KVPRESS_CPU_LEVEL`` names, else the processor's fastest.

    A level that an old compiler refuses, or that a wheel lacks, gives way to the next slower one with a warning, unless it was
    asked for.

    Raises:
        ValueError: for a level that is asked for and cannot run here, see `asked_level`.
        BuildError: the kernels can neither be found nor compiled.
    """
    wanted, levels = asked_level(), supported_levels()
    refused: dict[str, BuildError] = {}
    for level in [wanted] if wanted else reversed(levels):
        try:
            _load([library(level, source) for source in KERNELS])
        except FolderError:
            raise
        except BuildError as error:
            refused[level] = error
            continue
        if refused:
            say_once(f"CPU kernels for {levels[-1]} are not available, those for {level} run: {refused[levels[-1]]}")
        return level
    raise next(iter(refused.values()))


@functools.cache
def load(level: str, source: str = "decode.cpp") -> ctypes.CDLL:
    """The kernels of one source at one level; raises `BuildError` where they can neither be found nor compiled."""
    (kernels,) = _load([library(level, source)])
    return kernels


def _load(wanted: Sequence[Library]) -> list[ctypes.CDLL]:
    """Load libraries, compiling those that are neither in the package nor in a cache folder."""
    loaded = {each: kernels for each in wanted if (kernels := _packaged(each))}
    if missing := [each for each in wanted if each not in loaded]:
        loaded |= zip(missing, _from_cache(missing), strict=True)
    return [loaded[each] for each in wanted]


def _packaged(wanted: Library) -> ctypes.CDLL | None:
    """The library that the installed package brings. Who may write there may write this file too, so no owner is checked."""
    path = wanted.find(libraries.PACKAGED)
    try:
        return _open(path) if path else None
    except OSError as error:
        say_once(f"{path} cannot be loaded here, so it is compiled: {error}")
        return None


def _from_cache(missing: Sequence[Library]) -> list[ctypes.CDLL]:
    """Load libraries from the first folder that can hold them and whose files may be run."""
    failed: list[str] = []
    for folder in env.cache_dirs():
        try:
            opened = [_open(path) for path in compiled(missing, folder)]
        except OSError as error:
            failed.append(f"{folder} ({error})")
            continue
        if failed:
            say_once(
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
        # Its OpenMP functions are usually found in the runtime of torch; one without OpenMP needs the system's.
        with contextlib.suppress(OSError):
            ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(path))


def compiled(wanted: Sequence[Library], folder: Path) -> list[Path]:
    """Files of libraries in a cache folder, compiled where it has none that are whole.

    Raises:
        BuildError: they do not compile.
        OSError: the folder cannot be used.
    """
    key = libraries.compiler_key()
    folders = [folder, *(folder / level for level in sorted({each.level for each in wanted}))]

    def find() -> dict[Library, Path]:
        for path in folders:
            if path.exists():
                _check_owner(path)
        return {each: whole for each in wanted if (whole := each.find(folder, key))}

    found = find()
    if len(found) < len(wanted):
        for level in {each.level for each in wanted if each not in found}:
            libraries.check_compiler(level)
        for path in folders:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.ExitStack() as locks:
            for path in folders[1:]:
                locks.enter_context(_alone_in(path))
            found = find()  # another process may have compiled them meanwhile
            todo = [each for each in wanted if each not in found]
            with _announced(todo, folder):
                found |= zip(todo, libraries.compile_all(todo, folder), strict=True)
    return [found[each] for each in wanted]


@contextlib.contextmanager
def _announced(todo: list[Library], folder: Path) -> Iterator[None]:
    """Say what is being compiled, and how long it took; the probe takes no time worth a word."""
    names = ", ".join(f"{Path(each.source).stem} for {each.level}" for each in todo if each.source != PROBE)
    started = time.monotonic()
    if names:
        libraries.logger.warning("compiling CPU kernels with %s, once: %s", libraries.compiler(), names)
    yield
    if names:
        libraries.logger.warning("compiled in %.0f s, kept in %s", time.monotonic() - started, folder)


def _check_owner(folder: Path) -> None:
    """Refuse a folder that others could put libraries into: what lies there is run."""
    state = folder.stat()
    if state.st_uid not in (env.user(), 0) or state.st_mode & stat.S_IWOTH:
        raise PermissionError(f"{folder} belongs to another user, or others can write to it")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Wait until no other process builds in a folder. The lock ends with its process; file systems without locks do without.

    The folder itself is locked, so that nothing but libraries lies in it; `filelock` would add a file.
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
            say_once(f"waiting for another process that compiles CPU kernels in {folder.parent}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
    finally:
        os.close(handle)
