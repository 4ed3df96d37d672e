# SPDX-License-Identifier: Apache-2.0
"""Files that commands write: none is replaced by mistake."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def check_outputs(outputs: Iterable[Path], inputs: Iterable[str | Path] = (), force: bool = False) -> None:
    """Refuse to replace a file without `force`, and to replace an input in any case, whatever link it is reached by.

    `inputs` are files, folders whose files count, or names that are no path, such as those of models.

    Raises:
        ValueError: a file is there.
    """
    sources = [file for source in map(Path, inputs) for file in (source.iterdir() if source.is_dir() else [source])]
    for path in outputs:
        if not path.exists():
            continue
        same = next((source for source in sources if source.exists() and path.samefile(source)), None)
        if same is not None:
            raise ValueError(f"{path} is also read, as {same}: name another --out")
        if not force:
            raise ValueError(f"{path} exists: name another --out, or replace it with --force")
