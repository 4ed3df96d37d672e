# SPDX-License-Identifier: Apache-2.0
"""Published data: from a file in the user's folder, or from the Hugging Face hub at a fixed commit."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvpress_eval.common.errors import DataError

_PARQUET = b"PAR1"
_SECONDS = 5
"""How long the hub may take to answer; without network a command fails in less than twice that."""


@dataclass(frozen=True)
class HubFile:
    """A file of a dataset repository as it was at a commit, or a member of an archive there.

    `names` are those that it may have in the user's folder, `form` says what its rows are. `sha256` is that of the file at
    `path`: what several public projects have recorded for it at this commit; None where none is known, since a commit
    decides the file as well. Without a `revision` the file has to be placed by the user: nothing is fetched that may change.
    """

    names: tuple[str, ...]
    form: str
    repository: str
    revision: str | None
    path: str
    sha256: str | None = None
    member: str | None = None

    @property
    def origin(self) -> str:
        """Where the file comes from, for messages."""
        member = f"{self.member} in " if self.member else ""
        at = f" at {self.revision}" if self.revision else ""
        return f"{member}{self.path} of https://huggingface.co/datasets/{self.repository}{at}"

    @property
    def placing(self) -> str:
        """Under which names it may lie in a folder, for messages; goes on where the folder was named."""
        first, *others = self.names
        return f"{first}, or there as {' or '.join(others)}" if others else first


@dataclass(frozen=True)
class Content:
    """The bytes of a file, and what messages call it."""

    raw: bytes
    where: str

    @cached_property
    def sha256(self) -> str:
        """The hash that says which file it was."""
        return hashlib.sha256(self.raw).hexdigest()

    def rows(self) -> Iterator[tuple[str, Any]]:
        """Yield every row with its place, from a Parquet file, a JSON array or JSON lines.

        Raises:
            DataError: a row cannot be read.
        """
        if self.raw.startswith(_PARQUET):
            yield from self._numbered(self._parquet())
        elif self.raw.lstrip().startswith(b"["):
            yield from self._numbered(_json(self.raw, self.where))
        else:
            # Split as bytes: `str.splitlines` would also split at the line separators that texts contain.
            for number, line in enumerate(self.raw.splitlines(), start=1):
                yield f"{self.where}:{number}", _json(line, f"{self.where}:{number}")

    def _numbered(self, rows: list[Any]) -> Iterator[tuple[str, Any]]:
        for number, row in enumerate(rows, start=1):
            yield f"{self.where}: row {number}", row

    def _parquet(self) -> list[Any]:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table

        try:
            rows: list[Any] = read_table(io.BytesIO(self.raw)).to_pylist()
        except (ArrowException, OSError) as error:
            raise DataError(f"{self.where}: not a Parquet file ({_first_line(error)})") from error
        return rows


def read(file: HubFile, folder: Path | None) -> Content:
    """Read a file from the user's folder or, without one, from the hub or its cache on this machine.

    Raises:
        DataError: there is no such file, it cannot be read, or the hub cannot be reached; says what to place where.
    """
    if folder is None and file.revision is None:
        raise DataError(
            f"no fixed revision is known for {file.origin}, which may change: give --data-dir FOLDER and place it at "
            f"FOLDER/{file.placing}: {file.form}"
        )
    if folder is None:
        return _fetch(file)
    for path in (folder / name for name in file.names):
        try:
            return Content(path.read_bytes(), str(path))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DataError(f"cannot read {path}: {error}") from error
    raise DataError(f"no such file: place it at {folder.absolute()}/{file.placing}; it is {file.origin}, {file.form}")


def _fetch(file: HubFile) -> Content:
    try:
        path = _locate(file)
        content = Content(path.read_bytes(), file.origin)
        if file.sha256 not in (None, content.sha256):
            raise ValueError(f"{path} has the SHA-256 {content.sha256}, not {file.sha256}: delete it and try again")
        if file.member is None:
            return content
        with zipfile.ZipFile(io.BytesIO(content.raw)) as archive:
            return Content(archive.read(file.member), file.origin)
    except Exception as error:  # the libraries below have errors of their own, old and new
        raise DataError(
            f"cannot fetch {file.origin} ({_first_line(error)}); without network, give --data-dir FOLDER and place it at "
            f"FOLDER/{file.placing}: {file.form}"
        ) from error


def _locate(file: HubFile) -> Path:
    """Return where the hub's client keeps a file, after fetching it if it is not there yet."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    place = (file.repository, file.path)
    which: dict[str, Any] = {"repo_type": "dataset", "revision": file.revision}
    path = try_to_load_from_cache(*place, **which)
    if not isinstance(path, str):
        # Without network this fails at once, where the download alone would try again for half a minute.
        get_hf_file_metadata(hf_hub_url(*place, **which), timeout=_SECONDS)
        path = hf_hub_download(*place, **which)
    return Path(path)


def _json(raw: bytes, place: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise DataError(f"{place}: not JSON ({error})") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
