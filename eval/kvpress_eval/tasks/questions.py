# SPDX-License-Identifier: Apache-2.0
"""Read questions about passages, such as SQuAD and HotpotQA, from a file or from the Hugging Face hub at a fixed commit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvpress_eval.common.errors import DataError
from kvpress_eval.tasks.data_files import HubFile, read_published

Row = Mapping[str, Any]


@dataclass(frozen=True)
class PassageQuestion:
    """Question about passages."""

    text: str
    """The question."""
    answers: tuple[str, ...]
    """Right answers."""
    passages: tuple[str, ...]
    """Passages that hold the answer."""
    near: tuple[str, ...]
    """Similar passages without the answer."""


@dataclass(frozen=True)
class QuestionSet:
    """Questions of one file."""

    origin: str
    """Hash of the file, which identifies the questions in results."""
    questions: tuple[PassageQuestion, ...]
    """Questions in the order of the file."""

    @cached_property
    def passages(self) -> tuple[str, ...]:
        """All passages without duplicates."""
        return tuple(dict.fromkeys(text for question in self.questions for text in question.passages + question.near))

    def shuffled(self, seed: int, start: int) -> Iterator[PassageQuestion]:
        """Yield every question once, in an order that `seed` shuffles, from number `start` on."""
        order = list(range(len(self.questions)))
        random.Random(f"questions-{seed}").shuffle(order)  # noqa: S311  # reproducible, not secret
        for step in range(len(order)):
            yield self.questions[order[(start + step) % len(order)]]


@dataclass(frozen=True)
class PublishedQuestions:
    """Published file of questions."""

    file: HubFile
    """The file."""
    read: Callable[[Iterable[Row]], Iterator[PassageQuestion]]
    """Reads its rows."""


def squad(rows: Iterable[Row]) -> Iterator[PassageQuestion]:
    """Read rows with title, context, question and answers; other passages with the same title are the near ones."""
    rows = [flat for row in rows for flat in _flatten(row)]
    titles: dict[str, dict[str, None]] = {}
    for row in rows:
        titles.setdefault(row["title"], {})[row["context"]] = None
    for row in rows:
        answers = tuple(dict.fromkeys(row["answers"]["text"]))
        if answers:  # SQuAD 2 also has questions that the passage does not answer
            near = tuple(text for text in titles[row["title"]] if text != row["context"])
            yield PassageQuestion(row["question"], answers, (row["context"],), near)


def _flatten(row: Row) -> Iterator[Row]:
    """Yield a row, or the rows of all articles if it is the published file as one JSON object."""
    if "data" not in row:
        yield row
        return
    for article in row["data"]:
        for paragraph in article["paragraphs"]:
            for entry in paragraph["qas"]:
                yield {
                    "title": article.get("title", ""),
                    "context": paragraph["context"],
                    "question": entry["question"],
                    "answers": {"text": [answer["text"] for answer in entry["answers"]]},
                }


def hotpot(rows: Iterable[Row]) -> Iterator[PassageQuestion]:
    """Read rows with a question, its answer, titled passages and the titles of those that support the answer."""
    for row in rows:
        context, facts = row["context"], row["supporting_facts"]
        if isinstance(context, Mapping):  # the hub stores columns, the published file a list of [title, sentences]
            context = list(zip(context["title"], context["sentences"], strict=True))
            facts = [[title] for title in facts["title"]]
        supporting = {fact[0] for fact in facts}
        by_title = {title: f"{title}\n{''.join(sentences)}" for title, sentences in context}
        passages = tuple(text for title, text in by_title.items() if title in supporting)
        if not passages:
            raise ValueError(f"no passage supports the answer to {row['question']!r}")
        near = tuple(text for title, text in by_title.items() if title not in supporting)
        yield PassageQuestion(row["question"], (row["answer"],), passages, near)


def read_questions(source: PublishedQuestions, data_dir: Path | None) -> QuestionSet:
    """Return questions from a file in `data_dir`, or from the hub without a folder.

    Raises:
        DataError: there is no such file, it has another form, or the hub cannot be reached.
    """
    content = read_published(source.file, data_dir)
    try:
        questions = tuple(source.read([row for _, row in content.rows()]))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError(
            f"{content.where}: not questions in the form of {source.file.repository} ({error!r})"
        ) from error
    if not questions:
        raise DataError(f"{content.where} holds no question that can be answered")
    return QuestionSet(f"sha256:{content.sha256}", questions)
