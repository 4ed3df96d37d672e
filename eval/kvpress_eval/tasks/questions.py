"""Questions about passages, as SQuAD and HotpotQA have them: from a file, or pinned from the Hugging Face hub."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any

from kvpress_eval.errors import DataError
from kvpress_eval.hub import HubFile, read
from kvpress_eval.tasks.sample import Query, Spans
from kvpress_eval.tasks.scene import Scene

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


def answer_question(scene: Scene) -> tuple[str, Spans, Query]:
    """The passages that answer a question among others, the ones most like them first; samples differ in the question."""
    if scene.questions is None:
        raise ValueError("this task needs questions")
    language, room = scene.prose, scene.length - scene.total("")
    for question in scene.questions.shuffled(scene.seed, scene.index):
        asked = [language.passage(text) for text in question.passages]
        if sum(map(scene.cost, asked)) <= room:
            break
    near, left = [], (room - sum(map(scene.cost, asked))) // 2
    for text in scene.rng.sample(question.near, len(question.near)):
        left -= scene.cost(language.passage(text))
        if left < 0:
            break
        near.append(language.passage(text))
    own = {*question.passages, *question.near}
    others = [text for text in scene.questions.passages if text not in own]
    scene.rng.shuffle(others)
    filler = map(language.passage, cycle(others))
    context, spans = scene.weave([[text] for text in asked], [[text] for text in near], filler)
    return context, spans, language.ask_question(question.text, question.answers)


def _squad(rows: Iterable[Row]) -> Iterator[Question]:
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


def _hotpot(rows: Iterable[Row]) -> Iterator[Question]:
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


@dataclass(frozen=True)
class Source:
    """Where the questions of a task come from, and how its rows are read."""

    file: HubFile
    read: Callable[[Iterable[Row]], Iterator[Question]]


SOURCES = {
    "qa_1": Source(
        HubFile(
            ("squad.json", "squad.jsonl", "squad.parquet", "dev-v2.0.json"),
            "rows with title, context, question and answers, or the published JSON file",
            "rajpurkar/squad_v2",
            "3ffb306f725f7d2ce8394bc1873b24868140c412",
            "squad_v2/validation-00000-of-00001.parquet",
            "0560174ab095c5ac0a8c8dc8da05f1625453c45a77e4ce9cabc6947ddfdd24cb",
        ),
        _squad,
    ),
    "qa_2": Source(
        HubFile(
            ("hotpotqa.json", "hotpotqa.jsonl", "hotpotqa.parquet", "hotpot_dev_distractor_v1.json"),
            "rows with question, answer, context and supporting_facts",
            "hotpotqa/hotpot_qa",
            "1908d6afbbead072334abe2965f91bd2709910ab",
            "distractor/validation-00000-of-00001.parquet",
            "c20b638ca82b21d04fe12e14ff417ad05153d4d215a65de54497fca4e972f7c6",
        ),
        _hotpot,
    ),
}
"""The tasks that need questions."""


def read_questions(task: str, data_dir: Path | None) -> QuestionSet:
    """Return the questions of a task from a file in `data_dir`, or from the hub if no folder is given.

    Raises:
        DataError: there is no such file, it has another form, or the hub cannot be reached.
    """
    source = SOURCES[task]
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
