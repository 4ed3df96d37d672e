# SPDX-License-Identifier: Apache-2.0
"""Metrics of LongBench, equal to the published ones, quirks included; each returns a number in [0, 1] for any text."""

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
    """Return the highest score over the right answers; `first_line` scores only the first line of the text."""
    if first_line:
        text = text.lstrip("\n").split("\n")[0]
    return max(metric(text, answer) for answer in answers)


def f1(text: str, answer: str) -> float:
    """Return F1 of the words, ignoring case, punctuation and articles."""
    return overlap(words(text), words(answer))


def f1_chinese(text: str, answer: str) -> float:
    """Return F1 of the Chinese words that jieba separates."""
    return overlap(_chinese_words(text), _chinese_words(answer))


def rouge_l(text: str, answer: str) -> float:
    """Return the F score of ROUGE-L of summaries, as the package `rouge` 1.0.1 defines it."""
    precision, recall = rouge_l_parts(text, answer)
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_parts(text: str, answer: str) -> tuple[float, float]:
    """Return precision and recall of ROUGE-L of summaries, as the package `rouge` 1.0.1 defines them.

    A sentence ends at a full stop only. Distinct words are counted: the common words lie on a longest common subsequence of a
    sentence of the answer and a sentence of the text. Precision is their share of the text's words, recall of the answer's.
    """
    ours, theirs = _sentences(text), _sentences(answer)
    if not ours or not theirs:
        return 0.0, 0.0
    common = len(set(chain.from_iterable(_common(target, sentence) for target in theirs for sentence in ours)))
    return common / len(set(chain(*ours))), common / len(set(chain(*theirs)))


def rouge_l_chinese(text: str, answer: str) -> float:
    """Return ROUGE-L of the Chinese words that jieba separates."""
    return rouge_l(" ".join(_cut(text)), " ".join(_cut(answer)))


def classification(text: str, answer: str, *, classes: Sequence[str]) -> float:
    """Return 1 / (number of classes in the text) if the right class is one of them, else 0.

    A class whose name is a substring of the right one does not count. As in the published code, the loop deletes such names
    from the list that it iterates over, and therefore skips a name directly after a deleted one.
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
    """Return the similarity of the answer and the first line that is no comment and no fence, rounded to per cent.

    The similarity is that of `fuzzywuzzy` without python-Levenshtein, which the benchmark's requirements install.
    """
    lines = text.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if not line or not answer:
        return float(line == answer)
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def letter(text: str, answer: str) -> float:
    """Return 1 if the text contains "The correct answer is" with the right letter."""
    text = text.strip().replace("*", "")
    match = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return float(match is not None and match[1] == answer)


def overlap(ours: Sequence[str], theirs: Sequence[str]) -> float:
    """Return F1 of two sequences as multisets."""
    common = (Counter(ours) & Counter(theirs)).total()
    if not common:
        return 0.0
    precision, recall = common / len(ours), common / len(theirs)
    return 2 * precision * recall / (precision + recall)


def words(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation and articles."""
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
    # By default jieba unmarshals a cache file from the shared temporary folder, which any user can write.
    with tempfile.TemporaryDirectory() as private_folder:
        tokenizer.tmp_dir = private_folder
        tokenizer.initialize()
    return tokenizer


def _sentences(text: str) -> list[list[str]]:
    """Return the words of each sentence; a sentence of spaces has one empty word."""
    return [" ".join(sentence.split()).split(" ") for sentence in text.split(".") if sentence]


def _common(first: Sequence[str], second: Sequence[str]) -> Iterable[str]:
    """Yield the words of a longest common subsequence from its end; of several, the one that ends last in `first`."""
    lengths = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, word in enumerate(first):
        for j, second_word in enumerate(second):
            lengths[i + 1][j + 1] = (
                lengths[i][j] + 1 if word == second_word else max(lengths[i][j + 1], lengths[i + 1][j])
            )
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            i, j = i - 1, j - 1
            yield first[i]
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
