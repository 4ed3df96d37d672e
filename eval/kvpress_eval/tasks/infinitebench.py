# SPDX-License-Identifier: Apache-2.0
"""Scores of InfiniteBench (Zhang et al., 2024, arXiv:2402.13718), equal to the published ones, quirks included.

Each score takes the text of an answer and the right answers, and returns a number in [0, 1] for any text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvpress_eval.tasks.longbench.metrics import NO_CHINESE_PUNCTUATION, f1, overlap

_LETTERS = "ABCD"
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
    if text[:1] and text[0] in _LETTERS:
        return float(text[0] in answers)
    if text in answers:
        return 1.0
    text = re.sub(" +", " ", text.translate(_AROUND_CHOICE))
    is_right = _follows(text, ("answer is:", "answer:", "answer is", "option is"), answers)
    if is_right is not None:
        return float(is_right)
    return float(next((word for word in text.split() if word in _LETTERS), None) in answers)


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
        if int(digits) != int(value):
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
