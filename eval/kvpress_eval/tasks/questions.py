"""Questions about passages, as SQuAD and HotpotQA have them: from a file, or pinned from the Hugging Face hub."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from pathlib import Path
from typing import Any

from kvpress_eval.errors import DataError
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
    """Questions, and the hash or revision that says which they are."""

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
    rows = list(rows)
    titles: dict[str, dict[str, None]] = {}
    for row in rows:
        titles.setdefault(row["title"], {})[row["context"]] = None
    for row in rows:
        answers = tuple(dict.fromkeys(row["answers"]["text"]))
        if answers:  # SQuAD 2 also has questions that the passage does not answer
            near = tuple(text for text in titles[row["title"]] if text != row["context"])
            yield Question(row["question"], answers, (row["context"],), near)


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
    """Where the questions of a task come from: files of these names, or a dataset of the hub at this revision."""

    files: tuple[str, ...]
    dataset: str
    config: str
    revision: str
    read: Callable[[Iterable[Row]], Iterator[Question]]


SOURCES = {
    "qa_1": Source(
        ("squad.json", "squad.jsonl", "dev-v2.0.json"),
        "rajpurkar/squad_v2",
        "squad_v2",
        "3ffb306f725f7d2ce8394bc1873b24868140c412",
        _squad,
    ),
    "qa_2": Source(
        ("hotpotqa.json", "hotpotqa.jsonl", "hotpot_dev_distractor_v1.json"),
        "hotpotqa/hotpot_qa",
        "distractor",
        "1908d6afbbead072334abe2965f91bd2709910ab",
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
    if data_dir is None:
        rows = _download(source, task)
        return _parse(source, lambda: rows, f"{source.dataset}@{source.revision}", source.dataset)
    for path in (data_dir / name for name in source.files):
        if path.exists():
            break
    else:
        raise DataError(f"{task} needs questions: {_placing(source, str(data_dir.absolute()))}")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error}") from error
    origin = f"sha256:{hashlib.sha256(raw).hexdigest()}"
    return _parse(source, lambda: _rows(raw.decode(), lines=path.suffix == ".jsonl"), origin, str(path))


def _placing(source: Source, folder: str) -> str:
    names = " or ".join(source.files)
    return f"place {names}, in the form of {source.dataset} or of its published file, in {folder}"


def _download(source: Source, task: str) -> Iterable[Row]:
    from datasets import load_dataset

    try:
        return load_dataset(source.dataset, source.config, split="validation", revision=source.revision)
    except Exception as error:  # each library that datasets reads with has errors of its own
        advice = f"{_placing(source, 'a folder')} and give it as --data-dir"
        raise DataError(f"{task}: cannot load {source.dataset} from the hub ({error}); {advice}") from error


def _rows(text: str, *, lines: bool) -> list[Row]:
    if lines:
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    whole = json.loads(text)
    return whole if isinstance(whole, list) else [row for article in whole["data"] for row in _flatten(article)]


def _flatten(article: Row) -> Iterator[Row]:
    """Yield the rows of an article of a published SQuAD file."""
    for paragraph in article["paragraphs"]:
        for asked in paragraph["qas"]:
            answers = [answer["text"] for answer in asked["answers"]]
            yield {
                "title": article.get("title", ""),
                "context": paragraph["context"],
                "question": asked["question"],
                "answers": {"text": answers},
            }


def _parse(source: Source, rows: Callable[[], Iterable[Row]], origin: str, name: str) -> QuestionSet:
    try:
        questions = tuple(source.read(rows()))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError(f"{name}: not questions in the form of {source.dataset} ({error!r})") from error
    if not questions:
        raise DataError(f"{name} holds no question that can be answered")
    return QuestionSet(origin, questions)
