"""The published data of LongBench: from a folder of the user, or from the hub at a fixed revision."""

from __future__ import annotations

import hashlib
import json
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvpress_eval.errors import DataError


class Row(BaseModel, ABC):
    """What both versions have: a context, and a name that no other row of the file has."""

    model_config = ConfigDict(strict=True, frozen=True)

    id: str = Field(alias="_id")
    context: str

    @property
    def text(self) -> str:
        """The context as it goes into the prompt."""
        return self.context

    @property
    @abstractmethod
    def asked(self) -> dict[str, str]:
        """What the template takes after the context."""

    @property
    @abstractmethod
    def right(self) -> tuple[str, ...]:
        """The answers, any of which is right."""

    def adapt(self, metric: Callable[..., float]) -> Callable[[str, str], float]:
        """Return the metric with what it has to know of this row."""
        return metric


class Question(Row):
    """A row of version 1. `length` counts words, or characters of Chinese."""

    input: str
    answers: Annotated[list[str], Field(min_length=1)]
    length: int
    all_classes: list[str] | None

    @property
    def asked(self) -> dict[str, str]:
        return {"input": self.input}

    @property
    def right(self) -> tuple[str, ...]:
        return tuple(self.answers)


class Classified(Question):
    """A row of version 1 with the classes that a text may name."""

    all_classes: Annotated[list[str], Field(min_length=1)]

    def adapt(self, metric: Callable[..., float]) -> Callable[[str, str], float]:
        return partial(metric, classes=self.all_classes)


class Choice(Row):
    """A row of version 2: a question with four answers, one of them right."""

    domain: str
    difficulty: Literal["easy", "hard"]
    length: Literal["short", "medium", "long"]
    question: str
    choice_A: str  # noqa: N815  # the published name
    choice_B: str  # noqa: N815
    choice_C: str  # noqa: N815
    choice_D: str  # noqa: N815
    answer: Literal["A", "B", "C", "D"]

    @property
    def text(self) -> str:
        return self.context.strip()

    @property
    def asked(self) -> dict[str, str]:
        choices = {"A": self.choice_A, "B": self.choice_B, "C": self.choice_C, "D": self.choice_D}
        return {key: text.strip() for key, text in {"question": self.question, **choices}.items()}

    @property
    def right(self) -> tuple[str, ...]:
        return (self.answer,)


@dataclass(frozen=True)
class Published:
    """A file of rows: its name in the user's folder, and what it is on the hub.

    The revisions are commits of the dataset repositories. Version 1 is read from the archive because its repository loads by a
    script, which `datasets` has refused since 4.0.
    """

    name: str
    schema: type[Row]
    repository: str
    revision: str
    path: str
    member: str | None = None

    @property
    def origin(self) -> str:
        """Where the file comes from, for messages."""
        member = f"{self.member} in " if self.member else ""
        return f"{member}{self.path} of https://huggingface.co/datasets/{self.repository} at {self.revision}"


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a file, and the hash that says which file it was."""

    rows: Sequence[Row]
    sha256: str


def version_1(subset: str, schema: type[Question]) -> Published:
    """Return the file of a subset, such as `trec` or `trec_e`."""
    return Published(
        f"{subset}.jsonl",
        schema,
        "zai-org/LongBench",
        "5e628be450b7e67fb7ae6e201bd6d8f7056f7672",
        "data.zip",
        f"data/{subset}.jsonl",
    )


VERSION_2 = Published(
    "longbench-v2.json", Choice, "zai-org/LongBench-v2", "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9", "data.json"
)


def read(published: Published, folder: Path | None) -> Rows:
    """Read a file from the user's folder or, without one, from the hub or its cache on this machine."""
    if folder is None:
        raw = _download(published)
        where = published.origin
    else:
        path = folder / published.name
        where = str(path)
        try:
            raw = path.read_bytes()
        except FileNotFoundError as error:
            raise DataError(f"no such file: place it at {path.absolute()}; {_describe(published)}") from error
        except OSError as error:
            raise DataError(f"cannot read {path}: {error}") from error
    rows, seen = [], dict[str, str]()
    for place, value in _parse(raw, where):
        try:
            row = published.schema.model_validate(value)
        except ValidationError as error:
            problem = error.errors()[0]
            field = ".".join(map(str, problem["loc"])) or "row"
            raise DataError(f"{place}: not a LongBench row ({field}: {problem['msg']})") from error
        if row.id in seen:
            raise DataError(f"{place}: the _id {row.id!r} is that of {seen[row.id]} too")
        seen[row.id] = place
        rows.append(row)
    return Rows(rows, hashlib.sha256(raw).hexdigest())


def _parse(raw: bytes, where: str) -> Iterator[tuple[str, Any]]:
    """Yield every row with its place, from JSON lines or from one JSON array.

    Lines are split as bytes: `str.splitlines` would also split at the line separators that texts contain.
    """
    if raw.lstrip().startswith(b"["):
        for number, value in enumerate(_json(raw, where), start=1):
            yield f"{where}: row {number}", value
        return
    for number, line in enumerate(raw.splitlines(), start=1):
        yield f"{where}:{number}", _json(line, f"{where}:{number}")


def _json(raw: bytes, place: str) -> Any:
    try:
        return json.loads(raw)
    except ValueError as error:
        raise DataError(f"{place}: not JSON ({error})") from error


def _download(published: Published) -> bytes:
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    place = (published.repository, published.path)
    which: dict[str, Any] = {"repo_type": "dataset", "revision": published.revision}
    try:
        path = try_to_load_from_cache(*place, **which)
        if not isinstance(path, str):
            # Without network this fails at once, where the download alone would try again for half a minute.
            get_hf_file_metadata(hf_hub_url(*place, **which))
            path = hf_hub_download(*place, **which)
        if published.member is None:
            return Path(path).read_bytes()
        with zipfile.ZipFile(path) as archive:
            return archive.read(published.member)
    except Exception as error:  # the libraries below have errors of their own, old and new
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"cannot fetch {published.origin} ({reason}); "
            f"without network, place it at FOLDER/{published.name} and give --data-dir FOLDER; {_describe(published)}"
        ) from error


def _describe(published: Published) -> str:
    fields = ", ".join(field.alias or name for name, field in published.schema.model_fields.items())
    return f"it is {published.origin}, JSON objects with the fields {fields}"
