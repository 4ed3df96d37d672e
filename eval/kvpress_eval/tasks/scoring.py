# SPDX-License-Identifier: Apache-2.0
"""Scores of a generated text; always a number in [0, 1], whatever the text."""

from __future__ import annotations

from kvpress_eval.tasks.sample import Query


def score(query: Query, prediction: str | None) -> float:
    """Return 1 for a right answer, 0 for a wrong one, or the fraction of the expected strings found."""
    text = prediction or ""
    if callable(query.match):
        return query.match(text, query.answers)
    if query.match == "prefix":
        return float(any(_starts_with(text.lstrip(), answer) for answer in query.answers))
    found = [answer.lower() in text.lower() for answer in query.answers]
    return float(any(found)) if query.match == "any" else sum(found) / len(found)


def _starts_with(text: str, answer: str) -> bool:
    """Whether `text` starts with `answer` and the last word or number of it ends there."""
    rest = text[len(answer) :]
    return text.startswith(answer) and not rest[:1].isalnum()
