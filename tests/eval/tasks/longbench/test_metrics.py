# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpress_eval.tasks.longbench import metrics
from rouge import Rouge

METRICS = (metrics.f1, metrics.rouge_l, metrics.count, metrics.code_similarity, metrics.letter)
SENTENCES = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=5), min_size=1, max_size=3)


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("The cat sat.", "a cat sat down", 0.8),  # cat, sat against cat, sat, down: precision 1, recall 2/3
        ("YES!", "yes", 1.0),
        ("yes yes", "yes", 2 / 3),  # a word counts as often as it stands on both sides
        ("no", "yes", 0.0),
        ("", "yes", 0.0),
        ("the", "a", 0.0),
        ("well-known", "wellknown", 1.0),  # punctuation goes without leaving a space
    ],
)
def test_f1(text: str, answer: str, score: float) -> None:
    assert metrics.f1(text, answer) == pytest.approx(score)


def test_f1_of_chinese_words() -> None:
    # jieba separates 我 / 来到 / 北京 / 清华大学, as its own documentation shows.
    assert metrics.f1_chinese("北京，清华大学。", "我来到北京清华大学") == pytest.approx(2 / 3)  # noqa: RUF001
    assert metrics.f1_chinese("ABC 公司", "abc") == pytest.approx(2 / 3)
    assert metrics.f1_chinese("。。。", "北京") == 0


def longest_common(first: list[str], second: list[str]) -> int:
    """The longest common subsequence by trying every subsequence."""
    subsequences = {choice for size in range(len(second) + 1) for choice in combinations(second, size)}
    return max(size for size in range(len(first) + 1) for c in combinations(first, size) if c in subsequences)


def test_rouge_of_one_sentence_against_every_subsequence() -> None:
    rng = random.Random(0)  # noqa: S311  # reproducible, not secret
    for _ in range(60):
        # Words that stand once: then the number of distinct words on a longest subsequence is its length.
        ours, theirs = (rng.sample("abcdefgh", rng.randint(1, 7)) for _ in range(2))
        common = longest_common(ours, theirs)
        precision, recall = common / len(ours), common / len(theirs)
        expected = 2 * precision * recall / (precision + recall + 1e-8)
        assert metrics.rouge_l(" ".join(ours), " ".join(theirs)) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "answer", "precision", "recall"),
    [
        # The example of Lin's working note: w1 w2 from one sentence, w1 w3 w5 from the other.
        ("w1 w2 w6 w7 w8.w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 4 / 8, 4 / 5),
        ("a a a b", "a b", 1, 1),  # words are counted once
        ("a b.", "a b", 1, 1),
        ("a b. ", "a b", 2 / 3, 1),  # the text after the last stop is a sentence of one empty word
        ("A b", "a b", 1 / 2, 1 / 2),
        ("a,b", "a b", 0, 0),
        ("b a", "a b", 1 / 2, 1 / 2),
    ],
)
def test_rouge(text: str, answer: str, precision: float, recall: float) -> None:
    expected = 2 * precision * recall / (precision + recall + 1e-8)
    assert metrics.rouge_l(text, answer) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("nothing", ["", ".", "..."])
def test_rouge_of_nothing(nothing: str) -> None:
    assert metrics.rouge_l(nothing, "a b") == metrics.rouge_l("a b", nothing) == 0


@given(SENTENCES, SENTENCES)
def test_rouge_is_that_of_the_package(ours: list[list[str]], theirs: list[list[str]]) -> None:
    text, answer = (".".join(" ".join(words) for words in side) for side in (ours, theirs))
    assert metrics.rouge_l(text, answer) == Rouge().get_scores(text, answer)[0]["rouge-l"]["f"]


def test_rouge_of_chinese_words() -> None:
    # 北京 / 清华大学 out of 我 / 来到 / 北京 / 清华大学
    assert metrics.rouge_l_chinese("北京清华大学", "我来到北京清华大学") == pytest.approx(2 / 3, abs=1e-7)


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("Human description", "Human description", 1),
        ("It is Human, or Entity", "Human", 1 / 2),
        ("Entity", "Human", 0),
        ("something else", "Human", 0),
        ("Human description", "Human", 1 / 2),  # a longer name in the text holds the shorter one
        ("Date of birth", "Date of birth", 1),  # Date is a part of the right name
        ("Expression abbreviated", "Expression abbreviated", 1 / 2),  # so are the next two, but one is stepped over
    ],
)
def test_classification(text: str, answer: str, score: float) -> None:
    classes = ["Human", "Human description", "Entity", "Date", "Date of birth"]
    classes += ["Expression", "abbreviated", "Expression abbreviated"]
    assert metrics.classification(text, answer, classes=classes) == score


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [("7", "7", 1), ("7 or 8", "7", 1 / 2), ("17", "7", 0), ("seven", "7", 0), ("07", "7", 0)],
)
def test_count(text: str, answer: str, score: float) -> None:
    assert metrics.count(text, answer) == score


@pytest.mark.parametrize("answer", ["Paragraph 12", "段落12"])
def test_retrieval(answer: str) -> None:
    assert metrics.retrieval("Paragraph 12", answer) == 1
    assert metrics.retrieval("12, maybe 3 or 12", answer) == pytest.approx(2 / 3)
    assert metrics.retrieval("Paragraph 1", answer) == 0
    with pytest.raises(ValueError, match="names no paragraph"):
        metrics.retrieval("1", "12")


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("return x", "return x", 1),
        ("\n\nreturn x\nreturn y", "return x", 1),  # the first line that is not empty
        ("return x", "return y", 0.88),  # seven of eight characters on both sides: 87.5, and halves go to even
        ("```python\n# a comment\n// another\nreturn x", "return x", 1),
        ("# only a comment", "return x", 0),
        ("", "return x", 0),
        ("", "", 1),
        ("ababab", "aaaaab", 0.33),  # reported for fuzzywuzzy: 67 with python-Levenshtein
        ("abc", "cadb", 0.57),
        ("cadb", "abc", 0.29),
    ],
)
def test_code_similarity(text: str, answer: str, score: float) -> None:
    assert metrics.code_similarity(text, answer) == score


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("The correct answer is (B).", 1),
        ("**The correct answer is (B)**", 1),
        ("So: The correct answer is B", 1),
        ("The correct answer is (A). The correct answer is B", 0),
        ("The correct answer is A. The correct answer is (B)", 1),  # letters in parentheses come first
        ("(B)", 0),
        ("the correct answer is (B)", 0),
        ("", 0),
    ],
)
def test_letter(text: str, score: float) -> None:
    assert metrics.letter(text, "B") == score


def test_the_best_answer_counts_and_of_some_subsets_the_first_line() -> None:
    def score(text: str, *, first_line: bool) -> float:
        return metrics.best(text, ("no", "yes"), metric=metrics.f1, first_line=first_line)

    assert score("yes", first_line=True) == 1
    assert score("\n\nyes\nPassage: more", first_line=True) == 1
    assert score("yes\nPassage: more", first_line=False) == pytest.approx(1 / 2)


@given(st.text(max_size=40), st.text(min_size=1, max_size=40))
def test_a_score_is_between_zero_and_one_for_any_text(text: str, answer: str) -> None:
    for metric in METRICS:
        assert 0 <= metric(text, answer) <= 1
