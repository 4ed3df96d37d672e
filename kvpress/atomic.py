# SPDX-License-Identifier: Apache-2.0
"""Atomic replacement of files."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` when the block ends.

    After an error in the block, a crash or a full disk, `path` has its old content, or does not exist. Processes that write the
    same path at a time do not mix: the last one to end replaces the file.

    Raises:
        OSError: the folder cannot be written to, `path` is a folder, or the disk is full.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file by one with this content; raises as `replacing`."""
    with replacing(path) as file:
        file.write(content)


def _sync_folder(folder: Path) -> None:
    """Flush a folder, so that a new name in it survives a crash, where the system can open folders."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
