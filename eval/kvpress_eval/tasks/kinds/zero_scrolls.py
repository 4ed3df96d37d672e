# SPDX-License-Identifier: Apache-2.0
"""ZeroSCROLLS (Shaham et al., 2023, arXiv:2305.14196) as tasks: `zero_scrolls:SUBSET`.

The scores equal the published ones, quirks included. Each takes the text of an answer and the right answers, and returns a
number in [0, 1] for any text.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from typing import Any

from kvpress_eval.common.errors import ConfigError
from kvpress_eval.tasks.data_files import HubFile
from kvpress_eval.tasks.documents import DocumentQuestion, PublishedDocuments, Score, sources_of, text_of
from kvpress_eval.tasks.longbench.metrics import overlap, words
from kvpress_eval.tasks.source import Kind, Source, TaskSettings

_ROUGES = ("rouge1", "rouge2", "rougeL")
_PER_CENT = re.compile(r"\d+\.?\d*%")
_LETTER = re.compile(r"\b[A-D]\b")


def rouge_mean(text: str, answers: Sequence[str]) -> float:
    """Return the geometric mean of ROUGE-1, ROUGE-2 and ROUGE-L (F scores of `rouge-score`), each the best over the answers.

    Differs from the published figure, which is the geometric mean of the three averages over a data set: a mean over samples is
    lower, but presses can be compared sample by sample.
    """
    scores = [_scorer().score(answer, text) for answer in answers]
    product = 1.0
    for kind in _ROUGES:
        product *= max(score[kind].fmeasure for score in scores)
    return float(product ** (1 / 3))


@cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(_ROUGES), use_stemmer=False)


def best_f1(text: str, answers: Sequence[str]) -> float:
    """Return the best F1 of words, ignoring case, punctuation and articles, with letters mapped to ASCII by `unidecode`."""
    return max(overlap(_ascii_words(text), _ascii_words(answer)) for answer in answers)


def _ascii_words(text: str) -> list[str]:
    from unidecode import unidecode

    # A lone surrogate has no ASCII form, of which unidecode would warn.
    cleaned = " ".join(words(text)).encode("utf-8", "ignore").decode()
    return str(unidecode(cleaned)).split()


def letter(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the first A, B, C or D that stands alone in the text is that of the answer."""
    chosen = _LETTER.search(text)
    return float(chosen is not None and any(chosen[0] == _LETTER.findall(answer)[0] for answer in answers))


def exponential_similarity(text: str, answers: Sequence[str]) -> float:
    """Return 0.5 to the power of a tenth of the distance in per cent between the first percentages; 0 without one."""
    percentage = _percentage(text)
    if percentage is None:
        return 0.0
    return max(0.5 ** (abs(percentage - (_percentage(answer) or 0.0)) / 10) for answer in answers)


def _percentage(text: str) -> float | None:
    match = _PER_CENT.search(text)
    return None if match is None else float(match[0].removesuffix("%"))


def concordance(text: str, answers: Sequence[str]) -> float:
    """Return the share of pairs of numbers in the order of the answer; 0 if the text has other numbers than the answer."""
    order = _numbers(text)
    shares = []
    for answer in answers:
        right = _numbers(answer)
        if sorted(order) != sorted(right):
            shares.append(0.0)
            continue
        place = {number: at for at, number in enumerate(order)}
        pairs = [place[first] < place[second] for first, second in combinations(right, 2)]
        shares.append(sum(pairs) / len(pairs))
    return max(shares)


def _numbers(text: str) -> list[int]:
    """Return the numbers between commas and spaces of a text, whose other characters are removed."""
    try:
        return [int(number) for number in re.sub(r"[^0-9\s,]", "", text).replace(",", " ").split()]
    except ValueError:  # more digits than Python converts
        return []


def _has_text(answer: str) -> bool:
    return bool(answer.strip())


def _has_order(answer: str) -> bool:
    numbers = _numbers(answer)
    return len(numbers) > 1 and sorted(numbers) == list(range(1, len(numbers) + 1))


def _has_letter(answer: str) -> bool:
    return _LETTER.search(answer) is not None


def _has_percentage(answer: str) -> bool:
    return _percentage(answer) is not None


@dataclass(frozen=True)
class Metric:
    """Score of a subset."""

    score: Score
    """Scores an answer."""
    accepts: Callable[[str], bool]
    """Returns whether a right answer has the form that the score needs."""
    form: str
    """Form of a right answer, in words."""
    package: str | None = None
    """Module that the score needs, from the extra `benchmarks`."""


ROUGE = Metric(rouge_mean, _has_text, "a text", "rouge_score")
F1 = Metric(best_f1, _has_text, "a text", "unidecode")
ACCURACY = Metric(letter, _has_letter, "a letter from A to D")
SIMILARITY = Metric(exponential_similarity, _has_percentage, "a percentage such as 45%")
CONCORDANCE = Metric(concordance, _has_order, "the numbers from 1 on, at least two, in the right order")
SUBSETS: Mapping[str, tuple[Metric, int]] = {
    "gov_report": (ROUGE, 1024),
    "summ_screen_fd": (ROUGE, 512),
    "qmsum": (ROUGE, 512),
    "squality": (ROUGE, 512),
    "qasper": (F1, 128),
    "narrative_qa": (F1, 64),
    "quality": (ACCURACY, 10),
    "musique": (F1, 32),
    "space_digest": (SIMILARITY, 36),
    "book_sum_sort": (CONCORDANCE, 256),
}
"""Metric and most tokens of an answer, as published, by subset."""


def _parse(metric: Metric, number: str, row: Any) -> list[DocumentQuestion]:
    """Return the question of a row with `id`, `input`, `document_end_index` and `output`."""
    text, name = text_of(row, "input"), str(row["id"])
    end = row["document_end_index"]
    if type(end) is not int or not 0 < end <= len(text):
        raise ValueError(
            f"document_end_index must be an integer from 1 to {len(text)}, the length of input, got {end!r}"
        )
    if row["output"] is None:
        raise ValueError("output is null, as in the test set, whose answers are not published; take the validation set")
    answer = text_of(row, "output")
    if not metric.accepts(answer):
        raise ValueError(f"output must be {metric.form}, got {answer[:40]!r}")
    context = text[:end]
    document = hashlib.sha256(context.encode("utf-8", "replace")).hexdigest()
    return [DocumentQuestion(name, document, context, text[end:], (answer,))]


def _task(subset: str, metric: Metric, max_new_tokens: int) -> PublishedDocuments:
    return PublishedDocuments(
        f"zero_scrolls:{subset}",
        HubFile(
            (f"{subset}.jsonl", f"{subset}/validation.jsonl"),
            "JSON objects with id, input, output and document_end_index",
            "tau/zero_scrolls",
            None,
            f"{subset}.zip",
            member=f"{subset}/validation.jsonl",
        ),
        "input",
        partial(_parse, metric),
        metric.score,
        max_new_tokens,
    )


TASKS = {f"zero_scrolls:{subset}": _task(subset, *form) for subset, form in SUBSETS.items()}
ALL = "zero_scrolls:all"


def _expand(names: Sequence[str], request: TaskSettings) -> list[Source]:
    chosen = [task for name in names for task in (TASKS if name == ALL else [name])]
    for name in chosen:
        package = SUBSETS[name.partition(":")[2]][0].package
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{name} is scored with {package}: pip install 'kvpress-toolkit[benchmarks]'")
    return [source for name in chosen for source in sources_of(TASKS[name], request)]


KIND = Kind([*TASKS, ALL], _expand)
