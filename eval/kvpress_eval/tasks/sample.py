# SPDX-License-Identifier: Apache-2.0
"""A sample: one question about one context, with its right answers and the score of a generated one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Match = Literal["prefix", "contains", "any"] | Callable[[str, tuple[str, ...]], float]
Spans = tuple[tuple[int, int], ...]
"""Character ranges [start, stop)."""


@dataclass(frozen=True)
class Query:
    """Question and its right answers."""

    question: str
    """Text of the question."""
    answer_prefix: str
    """First words of the answer, which the prompt ends with."""
    answers: tuple[str, ...]
    """Expected strings."""
    match: Match
    """Comparison with the answers.

    "prefix": the text begins with one of them. "contains": the score is the share of answers in the text. "any": one of them
    is in the text. A function: the score of a benchmark.
    """
    separator: str = "\n"
    """Text between question and answer prefix for a model without a chat template."""
    chat: bool = True
    """Put the prompt into the model's chat template."""
    stop: tuple[str, ...] = ()
    """Strings at which generation stops early."""


@dataclass(frozen=True)
class Sample:
    """Context and a query about it."""

    id: str
    """Identifier, unique in a run."""
    task: str
    """Name of the task."""
    length: int
    """Requested tokens, which the context does not exceed; 0 if the task decides its length."""
    context: str
    """Text that is compressed."""
    query: Query
    """Question about the context."""
    spans: Spans = ()
    """Character ranges of the sentences with the answer, so that a report can show whether they were kept."""
    document: str = ""
    """Identifier of the document that `context` was cut from; empty if the context is the whole document."""


def score(query: Query, prediction: str | None) -> float:
    """Return 1 for a right answer and 0 for a wrong one; partial scores are shares of the expected strings or a benchmark's."""
    text = prediction or ""
    if callable(query.match):
        return query.match(text, query.answers)
    if query.match == "prefix":
        return float(any(_starts_with(text.lstrip(), answer) for answer in query.answers))
    matches = [answer.lower() in text.lower() for answer in query.answers]
    return float(any(matches)) if query.match == "any" else sum(matches) / len(matches)


def _starts_with(text: str, answer: str) -> bool:
    """Return whether `text` begins with `answer`, and the last word or number of the answer ends there."""
    tail = text[len(answer) :]
    return text.startswith(answer) and not tail[:1].isalnum()
