# SPDX-License-Identifier: Apache-2.0
"""SCBench (Li et al., 2024, arXiv:2412.10319) as tasks: several questions about one context that is compressed once.

In `scbench:SUBSET` each question follows the context alone. In `scbench:SUBSET:turns` it follows the earlier questions with
their right answers, as in a conversation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvpress_eval.tasks.data_files import HubFile
from kvpress_eval.tasks.documents import DocumentQuestion, PublishedDocuments, sources_of, text_of, texts_of
from kvpress_eval.tasks.kinds.infinitebench import (
    ASK_CHINESE,
    CHOICES,
    LETTERS,
    READ_CHINESE,
    SubsetWording,
    best_f1_chinese,
    choice,
    options_of,
    require_rouge,
    summary,
)
from kvpress_eval.tasks.longbench.subsets import CONTEXT
from kvpress_eval.tasks.source import Kind, Source, TaskSettings

TURNS = ":turns"


def contains(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the text contains the answer: `kv` and `prefix_suffix`."""
    return float(answers[0] in text)


def mentions(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the text contains any answer, ignoring case: `qa_eng` and `many_shot`."""
    return float(any(answer.upper() in text.upper() for answer in answers))


def share(text: str, answers: Sequence[str]) -> float:
    """Return the share of answers that the text contains, ignoring case, rounded to two digits: `vt`."""
    return round(sum(answer.lower() in text.lower() for answer in answers) / len(answers), 2)


def extreme(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the first number is the right one; if that is an integer, decimals are cut off: `mf`."""
    number = re.search(r"\d+\.\d+|\d+", text)
    if number is None:
        return 0.0
    value = float(number[0])
    if "." in answers[0]:
        return float(value == float(answers[0]))
    return float(math.isfinite(value) and int(value) == int(answers[0]))


_INPUT = "\n\n{input}\n"
FORMS: Mapping[str, SubsetWording] = {
    "kv": SubsetWording("Look up keys in this JSON object.\n\n", _INPUT, contains, 150),
    "prefix_suffix": SubsetWording("", _INPUT, contains, 150),
    "vt": SubsetWording("", _INPUT, share, 30),
    "qa_eng": SubsetWording(
        "Read the book; questions about it follow.\n\n", "\n\nQuestion: {input}\nAnswer:", mentions, 40
    ),
    "qa_chn": SubsetWording(READ_CHINESE, ASK_CHINESE, best_f1_chinese, 40),
    "choice_eng": SubsetWording(
        "Read the book; questions about it follow.\n\n",
        f"\n\nQuestion: {{input}}{CHOICES}The letter of the right answer is",
        choice,
        40,
        options=True,
    ),
    "many_shot": SubsetWording("", _INPUT, mentions, 10),
    "mf": SubsetWording("A list of numbers follows, and questions about it.\n\n", _INPUT, extreme, 5),
    "summary": SubsetWording("", _INPUT, summary, 200),
}
"""Subsets with one kind of question; `repoqa` and the two mixed subsets need SCBench's code parsers and are left out."""


def _parse(form: SubsetWording, turns: bool, number: str, row: Any) -> list[DocumentQuestion]:
    """Return the questions of a row: `context` (or `input`), and `multi_turns` with `input`, `answer`, maybe `options`."""
    context = form.before + text_of(row, "context", "input")
    if not isinstance(row["multi_turns"], list) or not row["multi_turns"]:
        raise TypeError("multi_turns must be a list with at least one turn")
    questions, before = [], ""
    for at, turn in enumerate(row["multi_turns"]):
        answers = texts_of(turn["answer"], "answer")
        fields = {"input": text_of(turn, "input")}
        if form.options:
            fields = {**fields, **dict(zip(LETTERS, options_of(turn), strict=True))}
        question = form.after.format(**fields)
        questions.append(DocumentQuestion(str(int(number) + at), number, context, before + question, answers))
        if turns:
            before += f"{question} {answers[0]}"
    return questions


TASKS = {
    f"scbench:{subset}{mode}": PublishedDocuments(
        f"scbench:{subset}{mode}",
        HubFile(
            (f"scbench_{subset}.jsonl", f"scbench_{subset}.parquet"),
            "JSON objects with context (or input) and multi_turns, a list of objects with input and answer",
            "microsoft/SCBench",
            None,
            f"data/scbench_{subset}.jsonl",
        ),
        form.before + CONTEXT + form.after,
        partial(_parse, form, bool(mode)),
        form.score,
        form.max_new_tokens,
    )
    for subset, form in FORMS.items()
    for mode in ("", TURNS)
}


def _expand(names: Sequence[str], request: TaskSettings) -> list[Source]:
    for name in names:
        require_rouge(TASKS[name])
    return [source for name in names for source in sources_of(TASKS[name], request)]


KIND = Kind(TASKS, _expand)
