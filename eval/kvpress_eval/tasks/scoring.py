# SPDX-License-Identifier: Apache-2.0
"""Score a generated text with a number in [0, 1]."""

from __future__ import annotations

from kvpress_eval.tasks.sample import Query


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
