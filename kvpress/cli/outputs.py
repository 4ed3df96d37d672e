# SPDX-License-Identifier: Apache-2.0
"""Check of output files, so that no file is replaced by mistake."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def check_outputs(outputs: Iterable[Path], inputs: Iterable[str | Path] = (), force: bool = False) -> None:
    """Refuse to replace a file without `force`; refuse to replace an input always, links included.

    `inputs` are files, folders with input files, or names that are not paths, such as those of models.

    Raises:
        ValueError: an output exists already, or is a folder.
    """
    sources = [file for source in map(Path, inputs) for file in (source.iterdir() if source.is_dir() else [source])]
    for path in outputs:
        if not path.exists():
            continue
        if path.is_dir():
            raise ValueError(f"{path} is a folder: pass the name of a file")
        same = next((source for source in sources if source.exists() and path.samefile(source)), None)
        if same is not None:
            raise ValueError(f"{path} is also read, as {same}: name another --out")
        if not force:
            raise ValueError(f"{path} exists: name another --out, or replace it with --force")
