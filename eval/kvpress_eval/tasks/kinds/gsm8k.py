# SPDX-License-Identifier: Apache-2.0
"""GSM8K (Cobbe et al., 2021, arXiv:2110.14168): short questions with long answers, which measure a press during decoding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from kvpress_eval.common.errors import DataError
from kvpress_eval.tasks.data_files import HubFile, read_published
from kvpress_eval.tasks.sample import Query, Sample
from kvpress_eval.tasks.source import Kind, Source, TaskSettings

NAME = "gsm8k"
TEST_SET = HubFile(
    ("gsm8k.jsonl", "test.jsonl", "gsm8k.parquet"),
    "rows with question and answer, or test.jsonl of https://github.com/openai/grade-school-math",
    "openai/gsm8k",
    "740312add88f781978c0658806c59bc2815b9866",
    "main/test-00000-of-00001.parquet",
    "ee7b8da9e381df27b9e3f7758a159ab2bdaa4dbaa910546cbbc47e0cb44e4f59",
)

_MARK = "####"
_NEXT = "Question:"
_NUMBER = re.compile(r"(?:(?<![\w.)])[-\u2212])?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+")

TEMPLATE = (
    "Solve each problem step by step. Put the final number alone on the last line, after ####.\n\n"
    "Question: A baker fills 7 trays with 12 rolls each. 9 rolls burn, and the others are sold for $2 each. How many "
    "dollars does the baker take in?\n"
    "Answer: There are 7 * 12 = 84 rolls.\nOf these 84 - 9 = 75 can be sold.\nThey bring in 75 * 2 = 150 dollars.\n#### 150\n\n"
    "Question: Ines reads 18 pages on Monday, twice as many on Tuesday and half as many as on Monday on Wednesday. Her "
    "book has 100 pages. How many pages are left?\n"
    "Answer: On Tuesday she reads 18 * 2 = 36 pages.\nOn Wednesday she reads 18 / 2 = 9 pages.\n"
    "In all she has read 18 + 36 + 9 = 63 pages.\nSo 100 - 63 = 37 pages are left.\n#### 37\n\n"
    "Question: A tank holds 1,500 liters. It is 40% full when a pump starts, which adds 25 liters per minute. After how "
    "many minutes is it full?\n"
    "Answer: At first there are 1500 * 0.4 = 600 liters.\n1500 - 600 = 900 liters are missing.\n"
    "That takes 900 / 25 = 36 minutes.\n#### 36\n\n"
    "Question: Three friends share the rent of $1,260 equally. One of them also pays all of the internet, which is $45. "
    "How much does that friend pay?\n"
    "Answer: Each pays 1260 / 3 = 420 dollars of rent.\nWith the internet that friend pays 420 + 45 = 465 dollars.\n"
    "#### 465\n\n"
    "Question: {question}\nAnswer:"
)
"""Four worked examples, written for this package, then the question."""


@dataclass(frozen=True)
class GSM8KProblems:
    """Questions of the test set."""

    problems: Sequence[tuple[str, str]]
    """Each question with its final number, in the order of the test set."""
    sha256: str
    """Hash of the file, which identifies it in results."""

    def samples(self, count: int) -> list[Sample]:
        """Return samples of the first `count` questions; the context is the full prompt, with the question."""
        return [
            Sample(
                f"{NAME}-{index}",
                NAME,
                0,
                TEMPLATE.format(question=question),
                Query("", "", (answer,), score_number, separator="", stop=(_NEXT,)),
            )
            for index, (question, answer) in enumerate(self.problems[:count])
        ]


def read_problems(folder: Path | None) -> GSM8KProblems:
    """Read the test set from the user's folder or, without one, from the hub.

    Raises:
        DataError: it cannot be read, or a row has no question or no answer that ends with `#### NUMBER`.
    """
    content = read_published(TEST_SET, folder)
    problems = [_problem(row, place) for place, row in content.rows()]
    if not problems:
        raise DataError(f"{content.where} holds no question")
    return GSM8KProblems(problems, content.sha256)


def _expand(names: Sequence[str], request: TaskSettings) -> list[Source]:
    read = read_problems(request.data_dir)
    samples = read.samples(request.samples)
    identity = {"gsm8k": read.sha256, "template": TEMPLATE}
    # Worked solutions take a few hundred tokens.
    room = request.max_new_tokens or 512
    return [Source(NAME, 0, [sample.id for sample in samples], lambda _: samples, identity, room)]


def _problem(row: Any, place: str) -> tuple[str, str]:
    """Return the question and the final number of a row."""
    match row:
        case {"question": str(question), "answer": str(answer)} if _MARK in answer:
            number = find_number(answer.rpartition(_MARK)[2])
            if number is not None:
                return question, f"{number:f}"
    raise DataError(f"{place}: not a row of GSM8K: needs question and answer, which ends with {_MARK} and a number")


def score_number(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the final number of an answer is the right one.

    The final number is the first one after `####` on the same line, as in lm-eval's filter `strict-match`; without one it is
    the last number of the text, as in `flexible-extract`. The text ends before another `Question:`, where lm-eval stops.
    Values are compared, so that thousands separators, currency signs and trailing zeros make no difference.
    """
    answer_text = text.partition(_NEXT)[0]
    marked = [find_number(line.partition(_MARK)[2]) for line in answer_text.splitlines() if _MARK in line]
    number_found = next((number for number in marked if number is not None), None)
    if number_found is None:
        number_found = find_number(answer_text, last=True)
    return float(number_found is not None and any(number_found == Decimal(answer) for answer in answers))


def find_number(text: str, *, last: bool = False) -> Decimal | None:
    """Return the first or the last number of a text, without its currency sign and separators."""
    numbers = _NUMBER.findall(text)
    if not numbers:
        return None
    return Decimal(re.sub(r"[$,]", "", numbers[-1 if last else 0]).replace("\u2212", "-"))


KIND = Kind((NAME,), _expand)
