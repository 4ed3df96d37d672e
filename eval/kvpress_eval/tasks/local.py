# SPDX-License-Identifier: Apache-2.0
"""Files of the user, given as `file:PATH`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpress_eval.common.errors import DataError

PREFIX = "file:"


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn errors while a file is read into a DataError with the kind of file, `what`, and its path."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"no such {what}: place it at {path.absolute()}") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {what} {path}: {error}") from error
