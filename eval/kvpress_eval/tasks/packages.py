# SPDX-License-Identifier: Apache-2.0
"""Rows of data files in installed packages, with the version and hash that identify them in results."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvpress.packages import DataPackage
from kvpress_eval.common.errors import DataError
from kvpress_eval.tasks.hub import Content


@dataclass(frozen=True)
class PackagedRows:
    """Rows of one file."""

    rows: tuple[tuple[str, Any], ...]
    """Each row with its place, for messages."""
    origin: dict[str, str]
    """Package, version and SHA-256 of the file."""


@contextmanager
def packaged() -> Iterator[None]:
    """Turn the errors of a missing package, or of a file that it lacks, into a DataError."""
    try:
        yield
    except (ImportError, OSError) as error:
        raise DataError(str(error)) from error


def read_rows(package: DataPackage, file: str) -> PackagedRows:
    """Read a file of JSON Lines, gzipped or not, from an installed package.

    Raises:
        DataError: the package or its file is missing, or a row is not JSON.
    """
    with packaged():
        version, path = package.installed().version, package.path_of(file)
        if not path.is_file():
            raise package.missing(file)
        raw = path.read_bytes()
        content = Content(gzip.decompress(raw) if path.suffix == ".gz" else raw, str(path))
    origin = {"package": package.distribution, "version": version, "sha256": hashlib.sha256(raw).hexdigest()}
    return PackagedRows(tuple(content.rows()), origin)
