# SPDX-License-Identifier: Apache-2.0
"""Errors before and during a run, each with the exit code of the command."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class EvalError(Exception):
    """Error that the user can fix; the message describes the fix, and the class has the exit code."""

    exit_code = 1


class ConfigError(EvalError):
    """The configuration is wrong: unknown name, bad value, impossible length."""

    exit_code = 2


class DataError(EvalError):
    """A model or a data file is missing or unreadable."""

    exit_code = 3


class OutputError(EvalError):
    """The output folder cannot be written, or holds other files."""

    exit_code = 4


class BusyError(EvalError):
    """Other processes are running some of the cells."""

    exit_code = 5


class ClusterError(EvalError):
    """The machines of a cluster cannot be reached, or all of them are lost."""

    exit_code = 6


class DiskFullError(EvalError):
    """No disk space for another result; the results so far stay valid and the run can be resumed."""

    exit_code = 7


class EngineError(EvalError):
    """The engine of a server cannot go on."""

    exit_code = 8


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> str:
    """Return the message for an unknown name, with the nearest valid names."""
    names = sorted(valid)
    similar = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.7)
    hint = f"did you mean {' or '.join(similar)}?" if similar else f"choose from {', '.join(names)}"
    return f"unknown {kind} {name!r}: {hint}"


@contextmanager
def translated_os_errors(path: Path) -> Iterator[None]:
    """Turn operating system errors while writing `path` into errors with an exit code."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"no space left for {path}; free some and start again") from error
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from error
