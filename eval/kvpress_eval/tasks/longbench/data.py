# SPDX-License-Identifier: Apache-2.0
"""Read the published data of LongBench from the user's folder, or from the hub at a fixed commit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvpress_eval.common.errors import DataError
from kvpress_eval.tasks.data_files import HubFile, read_published


class Row(BaseModel, ABC):
    """Row of either version."""

    model_config = ConfigDict(strict=True, frozen=True)

    id: str = Field(alias="_id")
    """Identifier, unique in the file."""
    context: str
    """Text that the question is about."""

    @property
    def text(self) -> str:
        """Context for the prompt."""
        return self.context

    @property
    @abstractmethod
    def question_fields(self) -> dict[str, str]:
        """Fields of the template after the context."""

    @property
    @abstractmethod
    def right(self) -> tuple[str, ...]:
        """Right answers; one of them is enough."""

    def adapt(self, metric: Callable[..., float]) -> Callable[[str, str], float]:
        """Return the metric with the arguments that depend on this row."""
        return metric


class QuestionRow(Row):
    """Row of version 1."""

    input: str
    """The question."""
    answers: Annotated[list[str], Field(min_length=1)]
    """Right answers."""
    length: int
    """Words of the context, or characters in Chinese."""
    all_classes: list[str] | None
    """Classes of a classification."""

    @property
    def question_fields(self) -> dict[str, str]:
        return {"input": self.input}

    @property
    def right(self) -> tuple[str, ...]:
        return tuple(self.answers)


class Classified(QuestionRow):
    """Row of version 1 with classes."""

    all_classes: Annotated[list[str], Field(min_length=1)]

    def adapt(self, metric: Callable[..., float]) -> Callable[[str, str], float]:
        return partial(metric, classes=self.all_classes)


class MultipleChoiceRow(Row):
    """Row of version 2: a question with four answers, one of which is right."""

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
    def question_fields(self) -> dict[str, str]:
        choices = {"A": self.choice_A, "B": self.choice_B, "C": self.choice_C, "D": self.choice_D}
        return {key: text.strip() for key, text in {"question": self.question, **choices}.items()}

    @property
    def right(self) -> tuple[str, ...]:
        return (self.answer,)


@dataclass(frozen=True)
class PublishedRows:
    """Published file."""

    file: HubFile
    """The file."""
    schema: type[Row]
    """Schema that validates its rows."""


@dataclass(frozen=True, eq=False)
class FileRows:
    """Rows of a file."""

    rows: Sequence[Row]
    """Rows in the order of the file."""
    sha256: str
    """Hash of the file, which identifies it in results."""


def version_1(subset: str, schema: type[QuestionRow]) -> PublishedRows:
    """Return the file of a subset, such as `trec` or `trec_e`.

    The file is a member of an archive, read directly: `datasets` refuses the repository's loading script from 4.0 on.
    """
    file = HubFile(
        (f"{subset}.jsonl",),
        _form(schema),
        "zai-org/LongBench",
        "5e628be450b7e67fb7ae6e201bd6d8f7056f7672",
        "data.zip",
        "cb45b11a4133c6bc1d6a44b0f8e701335ff1e543195db1103472e575857f7f64",
        member=f"data/{subset}.jsonl",
    )
    return PublishedRows(file, schema)


def read_rows(published: PublishedRows, folder: Path | None) -> FileRows:
    """Read a file from the user's folder or, without one, from the hub or its cache on this machine.

    Raises:
        DataError: the file cannot be read, a row is invalid, or two rows have the same identifier.
    """
    content = read_published(published.file, folder)
    rows, seen = [], dict[str, str]()
    for where, value in content.rows():
        try:
            row = published.schema.model_validate(value)
        except ValidationError as error:
            problem = error.errors()[0]
            field = ".".join(map(str, problem["loc"])) or "row"
            raise DataError(f"{where}: not a LongBench row ({field}: {problem['msg']})") from error
        if row.id in seen:
            raise DataError(f"{where}: the _id {row.id!r} is that of {seen[row.id]} too")
        seen[row.id] = where
        rows.append(row)
    return FileRows(rows, content.sha256)


def _form(schema: type[Row]) -> str:
    fields = ", ".join(field.alias or name for name, field in schema.model_fields.items())
    return f"JSON objects with the fields {fields}"


VERSION_2 = PublishedRows(
    HubFile(
        ("longbench-v2.json",),
        _form(MultipleChoiceRow),
        "zai-org/LongBench-v2",
        "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9",
        "data.json",
        "15d61c22d92c96900b3c4948b6aeea218d3214b676a65df48e7b8555604c7fe2",
    ),
    MultipleChoiceRow,
)
