# SPDX-License-Identifier: Apache-2.0
"""InfiniteBench (Zhang et al., 2024, arXiv:2402.13718) as tasks: `infinitebench:SUBSET`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvpress_eval.common.errors import ConfigError
from kvpress_eval.tasks import infinitebench as scores
from kvpress_eval.tasks.data_files import HubFile
from kvpress_eval.tasks.documents import DocumentQuestion, PublishedDocuments, Score, sources_of, text_of, texts_of
from kvpress_eval.tasks.longbench.subsets import CONTEXT
from kvpress_eval.tasks.source import Kind, Source, TaskSettings

_REPOSITORY, _REVISION = "xinrongzhang2022/InfiniteBench", "90f0394333616266d9fe85824ceaf505093cbaa5"
LETTERS = "ABCD"
READ_CHINESE = "请阅读下面的书，然后回答问题。\n\n"  # noqa: RUF001
ASK_CHINESE = "\n\n问题：{input}\n请简短回答。答案："  # noqa: RUF001


@dataclass(frozen=True)
class SubsetWording:
    """Prompt and score of a subset; the wording is ours."""

    before: str
    """Prompt before the context."""
    after: str
    """Prompt after the context, with fields in braces."""
    score: Score
    """Scores an answer."""
    max_new_tokens: int
    """Maximum tokens of an answer."""
    options: bool = False
    """A question offers four answers."""


CHOICES = "\nA. {A}\nB. {B}\nC. {C}\nD. {D}\n"
_FIND = "One fact stands in much irrelevant text. Find it.\n\n"
_READ = "Read the book; a question about it follows.\n\n"

FORMS: Mapping[str, SubsetWording] = {
    "passkey": SubsetWording(_FIND, "\n\n{input}\nThe pass key is", scores.first_number, 6),
    "number_string": SubsetWording(_FIND, "\n\n{input}\nThe digits are", scores.first_number, 12),
    "kv_retrieval": SubsetWording("Look up a key in this JSON object.\n\n", "\n\n{input}\n", scores.among_words, 50),
    "longbook_sum_eng": SubsetWording("Summarize this book.\n\n", "\n\nSummary:", scores.summary, 1200),
    "longbook_choice_eng": SubsetWording(
        _READ, f"\n\nQuestion: {{input}}{CHOICES}The letter of the right answer is", scores.choice, 40, options=True
    ),
    "longbook_qa_eng": SubsetWording(_READ, "\n\nQuestion: {input}\nReply in a few words. Answer:", scores.best_f1, 40),
    "longbook_qa_chn": SubsetWording(READ_CHINESE, ASK_CHINESE, scores.best_f1_chinese, 40),
    "longdialogue_qa_eng": SubsetWording(
        "In this script, $$MASK$$ stands in place of the name of one character.\n\n",
        "\n\nThe name of the character that $$MASK$$ stands for is",
        scores.character,
        40,
    ),
    "math_find": SubsetWording(
        "A list of numbers follows, and a question about it.\n\n", "\n\n{input}\n", scores.found_number, 3
    ),
    "math_calc": SubsetWording(
        "List the value of an expression after each of its numbers.\n\nExpression: 2 + 5 - 3\nValues: [2, 7, 4]\n\n"
        "Expression: ",
        "\nValues:",
        scores.intermediate_values,
        30000,
    ),
    "code_run": SubsetWording("Python functions follow.\n\n", "\n\n{input}\nThe value is", scores.returned, 5),
    "code_debug": SubsetWording(
        "In one function of this code an error was hidden on purpose.\n\n",
        f"\n\nWhich function is it?{CHOICES}The right option is:",
        scores.erroneous_function,
        5,
        options=True,
    ),
}


def options_of(row: Any) -> list[str]:
    """Return the four answers that a question offers; raise a ValueError for another number."""
    options = [str(option) for option in row["options"]]
    if len(options) != len(LETTERS):
        raise ValueError(f"options must be {len(LETTERS)}, not {len(options)}")
    return options


def _parse(form: SubsetWording, number: str, row: Any) -> list[DocumentQuestion]:
    """Return the question of a row with `context`, `input`, `answer` (one or a list), and `options` if the form has them."""
    fields = {"input": text_of(row, "input")}
    answers = texts_of(row["answer"], "answer")
    if form.options:
        options = options_of(row)
        fields = {**fields, **dict(zip(LETTERS, options, strict=True))}
        if not (len(answers) == 2 and answers[1] in LETTERS):
            answers = (answers[0], LETTERS[options.index(answers[0])])
    context = form.before + text_of(row, "context")
    return [DocumentQuestion(number, number, context, form.after.format(**fields), answers)]


TASKS = {
    f"infinitebench:{subset}": PublishedDocuments(
        f"infinitebench:{subset}",
        HubFile(
            (f"{subset}.jsonl",),
            "JSON objects with the fields context, input, answer and options",
            _REPOSITORY,
            _REVISION,
            f"{subset}.jsonl",
        ),
        form.before + CONTEXT + form.after,
        partial(_parse, form),
        form.score,
        form.max_new_tokens,
    )
    for subset, form in FORMS.items()
}
ALL = "infinitebench:all"


def require_rouge(task: PublishedDocuments) -> None:
    """Raise a ConfigError if a task is scored by ROUGE and the package rouge-score is not installed."""
    if task.score is scores.summary and importlib.util.find_spec("rouge_score") is None:
        raise ConfigError(f"{task.name} is scored by rouge-score: pip install 'kvpress-toolkit[benchmarks]'")


def _expand(names: Sequence[str], request: TaskSettings) -> list[Source]:
    chosen = [task for name in names for task in (TASKS.values() if name == ALL else [TASKS[name]])]
    for task in chosen:
        require_rouge(task)
    return [source for task in chosen for source in sources_of(task, request)]


KIND = Kind([*TASKS, ALL], _expand)
