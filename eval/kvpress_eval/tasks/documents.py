# SPDX-License-Identifier: Apache-2.0
"""Tasks of published documents with questions: prompts have a maximum length, questions about a document share its context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kvpress_eval.common.errors import ConfigError, DataError
from kvpress_eval.common.files import hash_json
from kvpress_eval.tasks.data_files import HubFile, read_published
from kvpress_eval.tasks.sample import Query, Sample
from kvpress_eval.tasks.source import Source, TaskSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class DocumentQuestion:
    """Question about a document."""

    id: str
    """Identifier, unique in the file."""
    document: str
    """Identifier of the document."""
    context: str
    """Text of the document."""
    text: str
    """Prompt after the context."""
    answers: tuple[str, ...]
    """Right answers."""


Score = Callable[[str, Sequence[str]], float]
"""Function from a generated text and the right answers to a score in [0, 1]."""
Parse = Callable[[str, Any], list[DocumentQuestion]]
"""Function from the number of earlier questions and the content of a row to its questions.

It may raise KeyError, TypeError, ValueError, IndexError or SyntaxError for an invalid row.
"""


@dataclass(frozen=True)
class PublishedDocuments:
    """Task whose questions are in a published file."""

    name: str
    """Name of the task."""
    file: HubFile
    """File with the questions."""
    wording: str
    """Template of the prompts."""
    parse: Parse
    """Reads a row."""
    score: Score
    """Scores an answer."""
    max_new_tokens: int
    """Maximum tokens of an answer."""


def sources_of(task: PublishedDocuments, request: TaskSettings) -> list[Source]:
    """Return a published task at every length of a run, with its first `samples` questions.

    Rows with one identifier are one question with several right answers.

    Raises:
        ConfigError: the run sets no lengths.
        DataError: the file cannot be read, has an invalid row, or has no question.
    """
    require_lengths(task.name, request)
    content = read_published(task.file, request.data_dir)
    questions: dict[str, DocumentQuestion] = {}
    for where, row in content.rows():
        try:
            _add(questions, task.parse(str(len(questions)), row))
        except (KeyError, TypeError, ValueError, IndexError, SyntaxError) as error:
            missing = "missing: " if isinstance(error, KeyError) else ""
            raise DataError(f"{where}: not a row of {task.name} ({missing}{error})") from error
    if not questions:
        raise DataError(f"{content.where} holds no question")
    chosen = list(questions.values())[: request.samples]
    identity = {"file": content.sha256, "template": task.wording}
    return [
        Source(
            task.name,
            length,
            [f"{task.name}-{length}-{question.id}" for question in chosen],
            partial(_make, task.name, length, task.score, chosen),
            identity,
            request.max_new_tokens or task.max_new_tokens,
        )
        for length in request.lengths
    ]


def _add(questions: dict[str, DocumentQuestion], further: Sequence[DocumentQuestion]) -> None:
    """Add questions by identifier; a repeated question adds its right answers to the first one.

    Raises:
        ValueError: an identifier stands for two questions.
    """
    for question in further:
        first = questions.setdefault(question.id, question)
        if (first.context, first.text) != (question.context, question.text):
            raise ValueError(f"id {question.id!r} is that of an earlier row with another question")
        answers = tuple(dict.fromkeys((*first.answers, *question.answers)))
        questions[question.id] = replace(first, answers=answers) if first is not question else first


def _make(
    name: str, length: int, score: Score, questions: Sequence[DocumentQuestion], tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """Return a sample for each question; a context is cut in the middle to fit the longest question about it."""
    samples = []
    for _, group in groupby(questions, key=lambda question: question.document):
        of_document = list(group)
        longest = max((question.text for question in of_document), key=lambda text: len(tokenizer(text)["input_ids"]))
        whole = of_document[0].context
        context = cut_middle(whole, longest, length, tokenizer)
        for question in of_document:
            query = Query(question.text, "", question.answers, score, separator="")
            name_of_sample = f"{name}-{length}-{question.id}"
            samples.append(Sample(name_of_sample, name, length, context, query, document=hash_json(whole)))
    return samples


def require_lengths(name: str, request: TaskSettings) -> None:
    """Raise a ConfigError if a run of a published task does not set `lengths`."""
    if "lengths" not in request.model_fields_set:
        raise ConfigError(
            f"{name} needs lengths: the most tokens of a prompt, for example the model's limit less "
            "1024 for the template and the answer; longer prompts lose their middle"
        )


def cut_middle(context: str, question: str, longest: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the context, without its middle if context and question have more than `longest` tokens together.

    As in the benchmark, the prompt keeps as many tokens at its start as at its end.

    Raises:
        ValueError: the tokenizer is slow, or half of `longest` does not hold the question.
    """
    prompt = context + question
    if not tokenizer.is_fast:
        raise ValueError(
            "prompts of published tasks need a fast tokenizer, which returns the character offsets of tokens"
        )
    offsets = tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
    if len(offsets) <= longest:
        return context
    half = longest // 2
    start, stop = offsets[half - 1][1], offsets[len(offsets) - half][0]
    if stop > len(context):
        raise ValueError(
            f"length {longest} is too short: half of it must hold the question ({len(question)} characters)"
        )
    return context[:start] + context[stop:]


def text_of(row: Mapping[str, Any], *fields: str) -> str:
    """Return the first of `fields` that a row has; raise a TypeError if it is not text."""
    field = next((name for name in fields if name in row), fields[0])
    if not isinstance(row[field], str):
        raise TypeError(f"{field} must be text")
    return str(row[field])


def texts_of(value: Any, field: str) -> tuple[str, ...]:
    """Return the answers of a row as text; `value` is one answer or a non-empty list, else a TypeError is raised."""
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, (str, int, float)) for item in items):
        raise TypeError(f"{field} must be a text or a number, or a list of them")
    return tuple(str(item) for item in items)
