# SPDX-License-Identifier: Apache-2.0
"""Folders that all tests of a process share; they are removed when the process ends."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

_ALL = TemporaryDirectory(prefix="kvpress-tests-")


def new_folder() -> Path:
    """Make a folder that is removed when the process ends."""
    return Path(mkdtemp(dir=_ALL.name))
