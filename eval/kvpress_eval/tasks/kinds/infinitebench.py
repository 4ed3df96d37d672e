# SPDX-License-Identifier: Apache-2.0
"""InfiniteBench (Zhang et al., 2024, arXiv:2402.13718) as tasks: `infinitebench:SUBSET`.

The scores equal the published ones, quirks included. Each takes the text of an answer and the right answers, and returns a
number in [0, 1] for any text.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvpress_eval.common.errors import ConfigError
from kvpress_eval.tasks.data_files import HubFile
from kvpress_eval.tasks.documents import DocumentQuestion, PublishedDocuments, Score, sources_of, text_of, texts_of
from kvpress_eval.tasks.longbench.metrics import NO_CHINESE_PUNCTUATION, f1, overlap
from kvpress_eval.tasks.longbench.subsets import CONTEXT
from kvpress_eval.tasks.source import Kind, Source, TaskSettings

_REPOSITORY, _REVISION = "xinrongzhang2022/InfiniteBench", "90f0394333616266d9fe85824ceaf505093cbaa5"
LETTERS = "ABCD"
READ_CHINESE = "请阅读下面的书，然后回答问题。\n\n"  # noqa: RUF001
ASK_CHINESE = "\n\n问题：{input}\n请简短回答。答案："  # noqa: RUF001
_SEPARATORS = str.maketrans(dict.fromkeys("\n:\"'.,?!{}", " "))
_AROUND_CODE = str.maketrans(dict.fromkeys("\n.`'\":", " "))
_AROUND_CHOICE = str.maketrans(dict.fromkeys("\n\"'.,?!{}", " "))


def first_number(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the first digits of the text are the answer: `passkey` and `number_string`."""
    digits = re.search(r"[0-9]+", text)
    return float(digits is not None and digits[0] == answers[0])


def among_words(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the answer is one of the words of the text: `kv_retrieval`."""
    return float(answers[0] in text.translate(_SEPARATORS).split())


def returned(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the last word is the number that the code returns: `code_run`."""
    words = text.translate(_AROUND_CODE).split()
    try:
        return float(bool(words) and int(words[-1]) == int(answers[0]))
    except ValueError:
        return 0.0


def erroneous_function(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the text begins with the right letter, or has letter or function after a phrase like "is:": `code_debug`.

    `answers` are the name of the function and its letter. Only the first of the phrases that occurs counts.
    """
    name, letter = answers
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = text.strip()
    for mark in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        text = text.replace(mark, " ")
    return float(bool(_follows(re.sub(" +", " ", text), ("answer is:", "is:", "answer:"), (letter, name))))


def choice(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the text chooses the right option: `longbook_choice_eng`; `answers` are its text and its letter.

    The first match counts: a letter as the first character, with any text behind it; the text after a phrase like
    "answer is:"; the first word that is a substring of "ABCD", which the published code takes for a letter.
    """
    text = text.strip()
    if text[:1] and text[0] in LETTERS:
        return float(text[0] in answers)
    if text in answers:
        return 1.0
    text = re.sub(" +", " ", text.translate(_AROUND_CHOICE))
    is_right = _follows(text, ("answer is:", "answer:", "answer is", "option is"), answers)
    if is_right is not None:
        return float(is_right)
    return float(next((word for word in text.split() if word in LETTERS), None) in answers)


def character(text: str, answers: Sequence[str]) -> float:
    """Return 1 if one of the words, in capitals, is the name: `longdialogue_qa_eng`."""
    return float(answers[0] in text.translate(_SEPARATORS).upper().split())


def best_f1(text: str, answers: Sequence[str]) -> float:
    """Return the best F1 of words: `longbook_qa_eng`."""
    return max(f1(text, answer) for answer in answers)


def best_f1_chinese(text: str, answers: Sequence[str]) -> float:
    """Return the best F1 of characters: `longbook_qa_chn`."""
    ours = _characters(text)
    return max(overlap(ours, _characters(answer)) for answer in answers)


def found_number(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the first number is the right one: `math_find`.

    The published code raises an error for a decimal number where an integer is right; here the answer is wrong.
    """
    number = re.search(r"\d+\.\d+|\d+", text)
    if number is None or ("." in number[0] and "." not in answers[0]):
        return 0.0
    return float(float(number[0]) == float(answers[0]))


def intermediate_values(text: str, answers: Sequence[str]) -> float:
    """Return the share of values before the first wrong one, signs ignored: `math_calc`."""
    right = 0
    for digits, value in zip(re.findall(r"[0-9]+", text), answers, strict=False):
        # Compared as text: Python converts at most 4300 digits, and a broken answer may repeat one without end.
        if (digits.lstrip("0") or "0") != str(int(value)):
            break
        right += 1
    return right / len(answers)


def summary(text: str, answers: Sequence[str]) -> float:
    """Return the F score of rougeLsum, as the package `rouge-score` defines it: `longbook_sum_eng`."""
    from rouge_score.rouge_scorer import RougeScorer

    scored = RougeScorer(["rougeLsum"], use_stemmer=False).score(answers[0], text)
    return float(scored["rougeLsum"].fmeasure)


def _follows(text: str, phrases: Sequence[str], answers: Sequence[str]) -> bool | None:
    """Return whether an answer begins one character after the first phrase that occurs; None without a phrase."""
    for phrase in phrases:
        at = text.find(phrase)
        if at >= 0:
            return text[at + len(phrase) + 1 :].startswith(tuple(answers))
    return None


def _characters(text: str) -> list[str]:
    return list("".join(text.lower().translate(NO_CHINESE_PUNCTUATION).split()))


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
    "passkey": SubsetWording(_FIND, "\n\n{input}\nThe pass key is", first_number, 6),
    "number_string": SubsetWording(_FIND, "\n\n{input}\nThe digits are", first_number, 12),
    "kv_retrieval": SubsetWording("Look up a key in this JSON object.\n\n", "\n\n{input}\n", among_words, 50),
    "longbook_sum_eng": SubsetWording("Summarize this book.\n\n", "\n\nSummary:", summary, 1200),
    "longbook_choice_eng": SubsetWording(
        _READ, f"\n\nQuestion: {{input}}{CHOICES}The letter of the right answer is", choice, 40, options=True
    ),
    "longbook_qa_eng": SubsetWording(_READ, "\n\nQuestion: {input}\nReply in a few words. Answer:", best_f1, 40),
    "longbook_qa_chn": SubsetWording(READ_CHINESE, ASK_CHINESE, best_f1_chinese, 40),
    "longdialogue_qa_eng": SubsetWording(
        "In this script, $$MASK$$ stands in place of the name of one character.\n\n",
        "\n\nThe name of the character that $$MASK$$ stands for is",
        character,
        40,
    ),
    "math_find": SubsetWording(
        "A list of numbers follows, and a question about it.\n\n", "\n\n{input}\n", found_number, 3
    ),
    "math_calc": SubsetWording(
        "List the value of an expression after each of its numbers.\n\nExpression: 2 + 5 - 3\nValues: [2, 7, 4]\n\n"
        "Expression: ",
        "\nValues:",
        intermediate_values,
        30000,
    ),
    "code_run": SubsetWording("Python functions follow.\n\n", "\n\n{input}\nThe value is", returned, 5),
    "code_debug": SubsetWording(
        "In one function of this code an error was hidden on purpose.\n\n",
        f"\n\nWhich function is it?{CHOICES}The right option is:",
        erroneous_function,
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
    if task.score is summary and importlib.util.find_spec("rouge_score") is None:
        raise ConfigError(f"{task.name} is scored by rouge-score: pip install 'kvpress-toolkit[benchmarks]'")


def _expand(names: Sequence[str], request: TaskSettings) -> list[Source]:
    chosen = [task for name in names for task in (TASKS.values() if name == ALL else [TASKS[name]])]
    for task in chosen:
        require_rouge(task)
    return [source for task in chosen for source in sources_of(task, request)]


KIND = Kind([*TASKS, ALL], _expand)
