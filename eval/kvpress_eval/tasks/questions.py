# SPDX-License-Identifier: Apache-2.0
"""Questions about passages, as SQuAD and HotpotQA have them: from a file, or pinned from the Hugging Face hub."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvpress_eval.common.errors import DataError
from kvpress_eval.tasks.hub import HubFile, read

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Question:
    """A question, its right answers, the passages that answer it, and others that look as if they did."""

    text: str
    answers: tuple[str, ...]
    passages: tuple[str, ...]
    near: tuple[str, ...]


@dataclass(frozen=True)
class QuestionSet:
    """Questions, and the hash that says which they are."""

    origin: str
    questions: tuple[Question, ...]

    @cached_property
    def passages(self) -> tuple[str, ...]:
        """All passages, each once."""
        return tuple(dict.fromkeys(text for question in self.questions for text in question.passages + question.near))

    def shuffled(self, seed: int, start: int) -> Iterator[Question]:
        """Yield every question once: the order is that of the seed, the first one is number `start` of it."""
        order = list(range(len(self.questions)))
        random.Random(f"questions-{seed}").shuffle(order)  # noqa: S311  # reproducible, not secret
        for step in range(len(order)):
            yield self.questions[order[(start + step) % len(order)]]


@dataclass(frozen=True)
class Published:
    """A published file of questions, and how its rows are read."""

    file: HubFile
    read: Callable[[Iterable[Row]], Iterator[Question]]


def squad(rows: Iterable[Row]) -> Iterator[Question]:
    """Read rows with title, context, question and answers; the other passages of a title are the near ones."""
    rows = [flat for row in rows for flat in _flatten(row)]
    titles: dict[str, dict[str, None]] = {}
    for row in rows:
        titles.setdefault(row["title"], {})[row["context"]] = None
    for row in rows:
        answers = tuple(dict.fromkeys(row["answers"]["text"]))
        if answers:  # SQuAD 2 also has questions that the passage does not answer
            near = tuple(text for text in titles[row["title"]] if text != row["context"])
            yield Question(row["question"], answers, (row["context"],), near)


def _flatten(row: Row) -> Iterator[Row]:
    """Yield the rows behind a row: itself, or those of all articles if it is the whole published file."""
    if "data" not in row:
        yield row
        return
    for article in row["data"]:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                yield {
                    "title": article.get("title", ""),
                    "context": paragraph["context"],
                    "question": asked["question"],
                    "answers": {"text": [answer["text"] for answer in asked["answers"]]},
                }


def hotpot(rows: Iterable[Row]) -> Iterator[Question]:
    """Read rows with question, answer, titled passages and the titles that support the answer."""
    for row in rows:
        context, facts = row["context"], row["supporting_facts"]
        if isinstance(context, Mapping):  # columns on the hub, pairs in the published files
            context = list(zip(context["title"], context["sentences"], strict=True))
            facts = [[title] for title in facts["title"]]
        supporting = {fact[0] for fact in facts}
        told = {title: f"{title}\n{''.join(sentences)}" for title, sentences in context}
        passages = tuple(text for title, text in told.items() if title in supporting)
        if not passages:
            raise ValueError(f"no passage supports the answer to {row['question']!r}")
        near = tuple(text for title, text in told.items() if title not in supporting)
        yield Question(row["question"], (row["answer"],), passages, near)


def read_questions(source: Published, data_dir: Path | None) -> QuestionSet:
    """Return questions from a file in `data_dir`, or from the hub if no folder is given.

    Raises:
        DataError: there is no such file, it has another form, or the hub cannot be reached.
    """
    content = read(source.file, data_dir)
    try:
        questions = tuple(source.read([row for _, row in content.rows()]))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError(
            f"{content.where}: not questions in the form of {source.file.repository} ({error!r})"
        ) from error
    if not questions:
        raise DataError(f"{content.where} holds no question that can be answered")
    return QuestionSet(f"sha256:{content.sha256}", questions)
