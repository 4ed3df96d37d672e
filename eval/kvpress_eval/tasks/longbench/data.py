# SPDX-License-Identifier: Apache-2.0
"""The published data of LongBench: from a folder of the user, or from the hub at a fixed revision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvpress_eval.common.errors import DataError
from kvpress_eval.tasks.hub import HubFile, read


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
    """A published file, and what its rows must be."""

    file: HubFile
    schema: type[Row]


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of a file, and the hash that says which file it was."""

    rows: Sequence[Row]
    sha256: str


def version_1(subset: str, schema: type[Question]) -> Published:
    """Return the file of a subset, such as `trec` or `trec_e`.

    It is read from the archive because the repository loads by a script, which `datasets` has refused since 4.0.
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
    return Published(file, schema)


def read_rows(published: Published, folder: Path | None) -> Rows:
    """Read a file from the user's folder or, without one, from the hub or its cache on this machine."""
    content = read(published.file, folder)
    rows, seen = [], dict[str, str]()
    for place, value in content.rows():
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
    return Rows(rows, content.sha256)


def _form(schema: type[Row]) -> str:
    fields = ", ".join(field.alias or name for name, field in schema.model_fields.items())
    return f"JSON objects with the fields {fields}"


VERSION_2 = Published(
    HubFile(
        ("longbench-v2.json",),
        _form(Choice),
        "zai-org/LongBench-v2",
        "2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9",
        "data.json",
        "15d61c22d92c96900b3c4948b6aeea218d3214b676a65df48e7b8555604c7fe2",
    ),
    Choice,
)
