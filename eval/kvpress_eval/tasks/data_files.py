# SPDX-License-Identifier: Apache-2.0
"""Read the data files of tasks: published ones, those of installed packages, and the user's own.

A published file lies in the user's folder, or is fetched from the Hugging Face hub at a fixed commit.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvpress.packages import DataPackage
from kvpress_eval.common.errors import DataError

FILE_PREFIX = "file:"
"""Start of a name that is the path of a file of the user."""
_PARQUET = b"PAR1"
_SECONDS = 5
"""Timeout of a request to the hub; without network a command fails in less than twice this time."""


@dataclass(frozen=True)
class HubFile:
    """File of a dataset repository at a commit, or a member of an archive there."""

    names: tuple[str, ...]
    """File names that are accepted in the user's folder."""
    form: str
    """Description of the rows, for messages."""
    repository: str
    """Dataset repository on the hub."""
    revision: str | None
    """Commit; None if no commit is known. Then the user has to place the file, as nothing is fetched that may change."""
    path: str
    """Path in the repository."""
    sha256: str | None = None
    """Hash of the file at `path`, as public projects have recorded it; None if none is known, as the commit fixes the file."""
    member: str | None = None
    """Path in the archive at `path`; None if that is the file itself."""

    @property
    def origin(self) -> str:
        """Source of the file, for messages."""
        member = f"{self.member} in " if self.member else ""
        at = f" at {self.revision}" if self.revision else ""
        return f"{member}{self.path} of https://huggingface.co/datasets/{self.repository}{at}"

    @property
    def placing(self) -> str:
        """Accepted file names, for messages, to be appended to the name of a folder."""
        first, *others = self.names
        return f"{first}, or there as {' or '.join(others)}" if others else first


@dataclass(frozen=True)
class Content:
    """Bytes of a file."""

    raw: bytes
    """Content."""
    where: str
    """Name of the file in messages."""

    @cached_property
    def sha256(self) -> str:
        """Hash of the content, which identifies the file in results."""
        return hashlib.sha256(self.raw).hexdigest()

    def rows(self) -> Iterator[tuple[str, Any]]:
        """Yield every row with its location for messages, from a Parquet file, a JSON array or JSON Lines.

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

    def value(self) -> Any:
        """Return the value of a JSON file.

        Raises:
            DataError: the content is not JSON.
        """
        return _json(self.raw, self.where)

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


@dataclass(frozen=True)
class PackagedFile:
    """File in an installed package."""

    content: Content
    """Content, decompressed if the file is gzipped."""
    origin: dict[str, str]
    """Package, version and SHA-256 of the file."""


@dataclass(frozen=True)
class PackagedRows:
    """Rows of a file in an installed package."""

    rows: tuple[tuple[str, Any], ...]
    """Each row with its location, for messages."""
    origin: dict[str, str]
    """Package, version and SHA-256 of the file."""


def read_published(file: HubFile, folder: Path | None) -> Content:
    """Read a file from the user's folder or, without one, from the hub or its cache on this machine.

    Raises:
        DataError: there is no such file, it cannot be read, or the hub cannot be reached; names the file and its folder.
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


@contextmanager
def packaged() -> Iterator[None]:
    """Turn the errors of a missing package, or of a file that it lacks, into a DataError."""
    try:
        yield
    except (ImportError, OSError) as error:
        raise DataError(str(error)) from error


def read_packaged_file(package: DataPackage, file: str) -> PackagedFile:
    """Read a file, gzipped or not, from an installed package.

    Raises:
        DataError: the package or its file is missing.
    """
    with packaged():
        version, path = package.installed().version, package.path_of(file)
        if not path.is_file():
            raise package.missing(file)
        raw = path.read_bytes()
        content = Content(gzip.decompress(raw) if path.suffix == ".gz" else raw, str(path))
    origin = {"package": package.distribution, "version": version, "sha256": hashlib.sha256(raw).hexdigest()}
    return PackagedFile(content, origin)


def read_packaged(package: DataPackage, file: str) -> PackagedRows:
    """Read a file of JSON Lines or a JSON array, gzipped or not, from an installed package.

    Raises:
        DataError: the package or its file is missing, or a row is not JSON.
    """
    packaged_file = read_packaged_file(package, file)
    return PackagedRows(tuple(packaged_file.content.rows()), packaged_file.origin)


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn errors while a file is read into a DataError with the kind of file, `what`, and its path."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"no such {what}: place it at {path.absolute()}") from error
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {what} {path}: {error}") from error


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
    except Exception as error:  # errors of huggingface_hub and its clients differ between versions
        raise DataError(
            f"cannot fetch {file.origin} ({_first_line(error)}); without network, give --data-dir FOLDER and place it at "
            f"FOLDER/{file.placing}: {file.form}"
        ) from error


def _locate(file: HubFile) -> Path:
    """Return the path of a file in the cache of the hub's client; fetch it first if it is missing."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    file_id = (file.repository, file.path)
    version: dict[str, Any] = {"repo_type": "dataset", "revision": file.revision}
    path = try_to_load_from_cache(*file_id, **version)
    if not isinstance(path, str):
        # Without network this request fails at once; the download would retry for half a minute.
        get_hf_file_metadata(hf_hub_url(*file_id, **version), timeout=_SECONDS)
        path = hf_hub_download(*file_id, **version)
    return Path(path)


def _json(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error})") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
