# SPDX-License-Identifier: Apache-2.0
"""The scores of LongBench, equal to the published ones, quirks included; each is in [0, 1] for any text."""

from __future__ import annotations

import difflib
import logging
import re
import string
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any

_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､"
    "、〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def best(text: str, answers: Sequence[str], *, metric: Callable[[str, str], float], first_line: bool) -> float:
    """Return the score against the answer that fits best."""
    if first_line:
        text = text.lstrip("\n").split("\n")[0]
    return max(metric(text, answer) for answer in answers)


def f1(text: str, answer: str) -> float:
    """Return the harmonic mean of precision and recall of the words, without case, punctuation and articles."""
    return overlap(_words(text), _words(answer))


def f1_chinese(text: str, answer: str) -> float:
    """Return the same over the words that jieba finds."""
    return overlap(_chinese_words(text), _chinese_words(answer))


def rouge_l(text: str, answer: str) -> float:
    """Return the F score of ROUGE-L of summaries, as the package `rouge` 1.0.1 defines it."""
    precision, recall = rouge_l_parts(text, answer)
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_parts(text: str, answer: str) -> tuple[float, float]:
    """Return precision and recall of ROUGE-L of summaries, as the package `rouge` 1.0.1 defines them.

    A sentence ends at a full stop and nowhere else. Counted are distinct words: those on a longest common subsequence of any
    sentence of the answer with any of the text, out of those of the text (precision) and of the answer (recall).
    """
    ours, theirs = _sentences(text), _sentences(answer)
    if not ours or not theirs:
        return 0.0, 0.0
    common = len(set(chain.from_iterable(_common(answered, said) for answered in theirs for said in ours)))
    return common / len(set(chain(*ours))), common / len(set(chain(*theirs)))


def rouge_l_chinese(text: str, answer: str) -> float:
    """Return ROUGE-L over the words that jieba finds."""
    return rouge_l(" ".join(_cut(text)), " ".join(_cut(answer)))


def classification(text: str, answer: str, *, classes: Sequence[str]) -> float:
    """Return one over the number of classes that the text names, if the right one is among them.

    A class whose name is a part of the right one does not count. The published loop removes such names while it walks over
    the list and so leaves one that comes right after another; so does this one.
    """
    named = [name for name in classes if name in text]
    at = 0
    while at < len(named):
        if named[at] in answer and named[at] != answer:
            del named[at]
        at += 1
    return 1 / len(named) if answer in named else 0.0


def count(text: str, answer: str) -> float:
    """Return the fraction of the numbers in the text that are the answer."""
    numbers = re.findall(r"\d+", text)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def retrieval(text: str, answer: str) -> float:
    """Return the fraction of the numbers in the text that are the number of the paragraph."""
    paragraph = re.search(r"(?:Paragraph |段落)(\d+)", answer)
    if paragraph is None:
        raise ValueError(f"the answer {answer!r} names no paragraph")
    return count(text, paragraph[1])


def code_similarity(text: str, answer: str) -> float:
    """Return how similar the first line that is neither a comment nor a fence is to the answer, in whole per cent.

    The similarity is that of `fuzzywuzzy` without python-Levenshtein, as the benchmark's requirements install it.
    """
    lines = text.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if not line or not answer:
        return float(line == answer)
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def letter(text: str, answer: str) -> float:
    """Return 1 if the text says which letter is correct, and it is."""
    text = text.strip().replace("*", "")
    said = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return float(said is not None and said[1] == answer)


def overlap(ours: Sequence[str], theirs: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall of items, each as often as it occurs."""
    common = (Counter(ours) & Counter(theirs)).total()
    if not common:
        return 0.0
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


def _words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_NO_PUNCTUATION)).split()


def _chinese_words(text: str) -> list[str]:
    words = ("".join(word.lower().translate(NO_CHINESE_PUNCTUATION).split()) for word in _cut(text))
    return [word for word in words if word]


def _cut(text: str) -> Iterable[str]:
    return _jieba().cut(text, cut_all=False)


@cache
def _jieba() -> Any:
    import jieba

    jieba.setLogLevel(logging.WARNING)
    tokenizer = jieba.Tokenizer()
    # By default it unmarshals a file from the common temporary folder, which anyone may have put there.
    with tempfile.TemporaryDirectory() as own:
        tokenizer.tmp_dir = own
        tokenizer.initialize()
    return tokenizer


def _sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence; one of nothing but spaces has one empty word."""
    return [" ".join(part.split()).split(" ") for part in text.split(".") if part]


def _common(first: Sequence[str], second: Sequence[str]) -> Iterable[str]:
    """Yield the words of a longest common subsequence, from its end; of several, the one that ends last in `first`."""
    lengths = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, word in enumerate(first):
        for j, other in enumerate(second):
            lengths[i + 1][j + 1] = lengths[i][j] + 1 if word == other else max(lengths[i][j + 1], lengths[i + 1][j])
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            yield first[i]
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
