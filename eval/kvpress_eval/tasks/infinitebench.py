# SPDX-License-Identifier: Apache-2.0
"""The scores of InfiniteBench (Zhang et al., 2024, arXiv:2402.13718), equal to the published ones, quirks included.

Each takes the text of an answer and the right answers, and is in [0, 1] for any text.
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
    found = re.search(r"[0-9]+", text)
    return float(found is not None and found[0] == answers[0])


def among_words(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the answer is one of the words: `kv_retrieval`."""
    return float(answers[0] in text.translate(_SEPARATORS).split())


def returned(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the last word is the number that the code returns: `code_run`."""
    words = text.translate(_AROUND_CODE).split()
    try:
        return float(bool(words) and int(words[-1]) == int(answers[0]))
    except ValueError:
        return 0.0


def erroneous_function(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the text begins with the right letter, or names letter or function after "is:" or so: `code_debug`.

    `answers` are the name of the function and its letter. What follows the first phrase that occurs counts alone.
    """
    name, letter = answers
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = text.strip()
    for mark in ("\n", "`", "'", '"', "-", "*", "Option", "option"):
        text = text.replace(mark, " ")
    return float(bool(_said(re.sub(" +", " ", text), ("answer is:", "is:", "answer:"), (letter, name))))


def choice(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the text chooses the right option: `longbook_choice_eng`; `answers` are its text and its letter.

    A letter at the very beginning counts whatever follows it, then what follows "answer is:" or so, then the first word that
    is a part of "ABCD", which the published code takes for a letter.
    """
    text = text.strip()
    if text[:1] and text[0] in _LETTERS:
        return float(text[0] in answers)
    if text in answers:
        return 1.0
    text = re.sub(" +", " ", text.translate(_AROUND_CHOICE))
    said = _said(text, ("answer is:", "answer:", "answer is", "option is"), answers)
    if said is not None:
        return float(said)
    return float(next((word for word in text.split() if word in _LETTERS), None) in answers)


def character(text: str, answers: Sequence[str]) -> float:
    """Return 1 if one of the words is the name in capitals: `longdialogue_qa_eng`."""
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

    The published code fails at a decimal number where a whole one is right; here it is wrong.
    """
    found = re.search(r"\d+\.\d+|\d+", text)
    if found is None or ("." in found[0] and "." not in answers[0]):
        return 0.0
    return float(float(found[0]) == float(answers[0]))


def intermediate_values(text: str, answers: Sequence[str]) -> float:
    """Return the share of values that are right up to the first wrong one, signs aside: `math_calc`."""
    right = 0
    for said, value in zip(re.findall(r"[0-9]+", text), answers, strict=False):
        if int(said) != int(value):
            break
        right += 1
    return right / len(answers)


def summary(text: str, answers: Sequence[str]) -> float:
    """Return the F score of rougeLsum, as the package `rouge-score` defines it: `longbook_sum_eng`."""
    from rouge_score.rouge_scorer import RougeScorer

    scored = RougeScorer(["rougeLsum"], use_stemmer=False).score(answers[0], text)
    return float(scored["rougeLsum"].fmeasure)


def _said(text: str, phrases: Sequence[str], answers: Sequence[str]) -> bool | None:
    """Return whether an answer comes one character behind the first phrase that occurs; None if none does."""
    for phrase in phrases:
        at = text.find(phrase)
        if at >= 0:
            return text[at + len(phrase) + 1 :].startswith(tuple(answers))
    return None


def _characters(text: str) -> list[str]:
    return list("".join(text.lower().translate(NO_CHINESE_PUNCTUATION).split()))
