# SPDX-License-Identifier: Apache-2.0
"""Published documents with questions about each: prompts of at most a length, contexts that all questions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from kvpress_eval.common.errors import ConfigError, DataError
from kvpress_eval.tasks.hub import HubFile, read
from kvpress_eval.tasks.sample import Query, Sample
from kvpress_eval.tasks.source import Request, Source


@dataclass(frozen=True)
class Asked:
    """A question about a document: `text` follows the context, `id` is that of no other question of the file."""

    id: str
    document: str
    context: str
    text: str
    answers: tuple[str, ...]


Score = Callable[[str, Sequence[str]], float]
Parse = Callable[[str, Any], list[Asked]]
"""Returns the questions of a row, from the number of those before and its content; errors of Python say why it is no row."""


@dataclass(frozen=True)
class Published:
    """A task whose questions are in a published file: how they are read, scored and how long an answer may be.

    `wording` is the template of its prompts.
    """

    name: str
    file: HubFile
    wording: str
    parse: Parse
    score: Score
    max_new_tokens: int


def sources_of(task: Published, request: Request) -> list[Source]:
    """Return a published task at every length of a run, with its first questions."""
    require_lengths(task.name, request)
    content = read(task.file, request.data_dir)
    asked: list[Asked] = []
    for place, row in content.rows():
        try:
            asked += task.parse(str(len(asked)), row)
        except (KeyError, TypeError, ValueError, IndexError, SyntaxError) as error:
            missing = "missing: " if isinstance(error, KeyError) else ""
            raise DataError(f"{place}: not a row of {task.name} ({missing}{error})") from error
    if not asked:
        raise DataError(f"{content.where} holds no question")
    asked = asked[: request.samples]
    identity = {"file": content.sha256, "template": task.wording}
    return [
        Source(
            task.name,
            length,
            [f"{task.name}-{length}-{one.id}" for one in asked],
            partial(_make, task.name, length, task.score, asked),
            identity,
            request.max_new_tokens or task.max_new_tokens,
        )
        for length in request.lengths
    ]


def _make(
    name: str, length: int, score: Score, asked: Sequence[Asked], tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """Return a sample for each question; a context loses as much of its middle as its longest question needs."""
    samples = []
    for _, group in groupby(asked, key=lambda one: one.document):
        about = list(group)
        longest = max((one.text for one in about), key=lambda text: len(tokenizer(text)["input_ids"]))
        context = cut_middle(about[0].context, longest, length, tokenizer)
        for one in about:
            query = Query(one.text, "", one.answers, score, separator="")
            samples.append(Sample(f"{name}-{length}-{one.id}", name, length, context, query))
    return samples


def require_lengths(name: str, request: Request) -> None:
    """Raise a ConfigError where a run does not say how long the prompts of a published task may be."""
    if "lengths" not in request.model_fields_set:
        raise ConfigError(
            f"{name} needs lengths: the most tokens of a prompt, for example the model's limit less "
            "1024 for the template and the answer; longer prompts lose their middle"
        )


def cut_middle(context: str, question: str, longest: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the context without the middle of a prompt that has more than `longest` tokens.

    As in the benchmark, context and question together keep as many tokens at their start as at their end.
    """
    prompt = context + question
    if not tokenizer.is_fast:
        raise ValueError("prompts of published tasks need a fast tokenizer, which says where in a text each token is")
    places = tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
    if len(places) <= longest:
        return context
    half = longest // 2
    start, stop = places[half - 1][1], places[len(places) - half][0]
    if stop > len(context):
        raise ValueError(
            f"length {longest} is too short: half of it must hold the question ({len(question)} characters)"
        )
    return context[:start] + context[stop:]


def text_of(row: Mapping[str, Any], *fields: str) -> str:
    """Return the first of some fields that a row has, which must be text."""
    field = next((name for name in fields if name in row), fields[0])
    if not isinstance(row[field], str):
        raise TypeError(f"{field} must be text")
    return str(row[field])


def texts_of(value: Any, field: str) -> tuple[str, ...]:
    """Return the answers of a row: one, or a list with at least one."""
    found = value if isinstance(value, list) else [value]
    if not found or not all(isinstance(item, (str, int, float)) for item in found):
        raise TypeError(f"{field} must be a text or a number, or a list of them")
    return tuple(str(item) for item in found)
