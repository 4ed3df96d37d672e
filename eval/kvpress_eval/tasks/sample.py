"""One question about one context, with what counts as a right answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Match = Literal["prefix", "contains"]
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Query:
    """A question, the words the answer starts with, and the strings that make it right.

    `match` is "prefix" where the answer has exactly one right text, and "contains" where a model may word
    its answer freely and each expected string counts by itself.
    """

    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    match: Match


@dataclass(frozen=True)
class Sample:
    """A context, a query about it, and where in the context the answer stands.

    `length` is the number of context tokens asked for; the context never has more. `spans` are the
    character ranges of the sentences the answer is in, so that a report can show whether they survived.
    """

    id: str
    task: str
    length: int
    context: str
    query: Query
    spans: Spans = ()
