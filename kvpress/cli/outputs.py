# SPDX-License-Identifier: Apache-2.0
"""Check of output files, so that no file is replaced by mistake."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


class OutputRefusedError(ValueError):
    """An output exists already, is a folder or an input, or its folder cannot be written to."""


def check_outputs(outputs: Iterable[Path], inputs: Iterable[str | Path] = (), force: bool = False) -> None:
    """Refuse to replace a file without `force`; refuse to replace an input always, links included.

    `inputs` are files, folders with input files, or names that are not paths, such as those of models.

    Raises:
        OutputRefusedError: an output exists already, is a folder or an input, or no file can be written in its folder.
    """
    sources = [file for source in map(Path, inputs) for file in (source.iterdir() if source.is_dir() else [source])]
    for path in outputs:
        if not path.exists():
            _check_folder(path)
            continue
        if path.is_dir():
            raise OutputRefusedError(f"{path} is a folder: pass the name of a file")
        same = next((source for source in sources if source.exists() and path.samefile(source)), None)
        if same is not None:
            raise OutputRefusedError(f"{path} is also read, as {same}: name another --out")
        if not force:
            raise OutputRefusedError(f"{path} exists: name another --out, or replace it with --force")


def _check_folder(path: Path) -> None:
    """Refuse a file in a folder that can neither be written to nor created."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise OutputRefusedError(f"cannot write {path}: {folder} is a file; name another --out")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputRefusedError(f"cannot write {path}: {folder} is read-only; name another --out")
