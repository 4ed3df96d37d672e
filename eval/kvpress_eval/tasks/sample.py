# SPDX-License-Identifier: Apache-2.0
"""One question about one context, with what counts as a right answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Match = Literal["prefix", "contains", "any"] | Callable[[str, tuple[str, ...]], float]
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Query:
    """A question, the words the answer starts with, and the strings that make it right.

    `match` is "prefix" where the answer has exactly one right text, "contains" where a model may word
    its answer freely and each expected string counts by itself ("any": one is enough), and a function where a benchmark
    has its own score.
    `separator` stands between question and answer prefix of a model without a chat template; `chat` says whether a
    model's template is used. An answer ends early at any of the `stop` strings, where a model would go on by itself.
    """

    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    match: Match
    separator: str = "\n"
    chat: bool = True
    stop: tuple[str, ...] = ()


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
