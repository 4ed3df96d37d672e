# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpress_eval.tasks.kinds.generated import generate, worded
from kvpress_eval.tasks.languages import LANGUAGES
from kvpress_eval.tasks.sample import Query, score
from transformers import PreTrainedTokenizerBase

REFERENCE = list(worded("reference"))
EXACT = Query("q", "p", ("4837",), "prefix")
SEVERAL = Query("q", "p", ("48213", "BKQ"), "contains")
ONE_OF = Query("q", "p", ("Lake Gosk", "Gosk"), "any")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("task", REFERENCE)
def test_contexts_fill_the_length_and_never_exceed_it(
    task: str,
    language: str,
    reference_tokenizer: PreTrainedTokenizerBase,
    byte_tokenizer: PreTrainedTokenizerBase,
) -> None:
    for tokenizer, length in ((reference_tokenizer, 256), (reference_tokenizer, 1024), (byte_tokenizer, 2048)):
        for sample in generate(task, tokenizer, length, 2, language=LANGUAGES[language]):
            tokens = len(tokenizer(sample.context)["input_ids"])
            assert 0.85 * length <= tokens <= length


@pytest.mark.parametrize("task", REFERENCE)
def test_a_sample_depends_on_its_seed_and_index_only(task: str, reference_tokenizer: PreTrainedTokenizerBase) -> None:
    def make(count: int, seed: int) -> list[object]:
        return list(generate(task, reference_tokenizer, 128, count, language=LANGUAGES["reference"], seed=seed))

    assert make(3, seed=0) == make(5, seed=0)[:3]
    assert make(3, seed=0) != make(3, seed=1)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("task", [task for task in REFERENCE if task != "cwe"])
def test_spans_cover_the_sentences_that_answer(
    task: str, language: str, reference_tokenizer: PreTrainedTokenizerBase
) -> None:
    for sample in generate(task, reference_tokenizer, 512, 3, language=LANGUAGES[language]):
        sentences = [sample.context[start:end] for start, end in sample.spans]
        assert all(sentence.startswith(" ") and sentence.endswith(".") for sentence in sentences)
        for answer in sample.query.answers:
            for word in answer.replace(".", "").split():
                if word.isdigit() or word.isupper():
                    assert any(word in sentence for sentence in sentences)


def test_depth_moves_the_answer(reference_tokenizer: PreTrainedTokenizerBase) -> None:
    def place(depth: float) -> float:
        (sample,) = generate("niah_single", reference_tokenizer, 512, 1, language=LANGUAGES["reference"], depth=depth)
        return sample.spans[0][0] / len(sample.context)

    assert place(0.0) == 0.0
    assert place(0.5) == pytest.approx(0.5, abs=0.05)
    assert place(1.0) > 0.95


@pytest.mark.parametrize("task", REFERENCE)
def test_reference_wording_is_one_token_per_word(task: str, reference_tokenizer: PreTrainedTokenizerBase) -> None:
    """The reference tokenizer spells unknown words in bytes: a context of known words has none."""
    (sample,) = generate(task, reference_tokenizer, 512, 1, language=LANGUAGES["reference"])
    text = sample.context + sample.query.question + "\n" + sample.query.answer_prefix
    pieces = reference_tokenizer.tokenize(text)
    letters = [piece for piece in pieces if len(piece) == 1 and piece.isalpha() and piece != "Ċ"]
    assert letters == []


def test_reference_question_forms(reference_tokenizer: PreTrainedTokenizerBase) -> None:
    forms = {
        "niah_multiquery": (r"\nWhat is the \w+ for \w+ and the \w+ for \w+\?", r"\d{4}\. The \w+ for \w+ is \d{4}"),
        "niah_multivalue": (r"\nWhat are all the (codes|numbers) for \w+\?", r"\d{4} and \d{4}"),
        "vt": (r"\nTrace \w+\.", r"\w+ be \w+ be \d{4}"),
        "cwe": (r"\nWhat is the most common word\?", r"\w+"),
    }
    for task, (question, answer) in forms.items():
        (sample,) = generate(task, reference_tokenizer, 256, 1, language=LANGUAGES["reference"])
        assert re.fullmatch(question, sample.query.question)
        assert re.fullmatch(answer, sample.query.answers[0])


def test_the_most_common_word_is_the_answer(reference_tokenizer: PreTrainedTokenizerBase) -> None:
    for sample in generate("cwe", reference_tokenizer, 256, 5, language=LANGUAGES["reference"]):
        listed = sample.context.removeprefix(" List: ").rstrip(".").split()
        counts = sorted(((listed.count(word), word) for word in set(listed)), reverse=True)
        assert (counts[0][1],) == sample.query.answers
        assert counts[0][0] > counts[1][0]


def test_too_short_a_length_is_refused(reference_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="length 16 is too short"):
        generate("vt", reference_tokenizer, 16, 1, language=LANGUAGES["reference"])


@pytest.mark.parametrize("name", ["niah_singel", "../../x"])
def test_unknown_task(name: str, reference_tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match="unknown task"):
        generate(name, reference_tokenizer, 64, 1, language=LANGUAGES["reference"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" 4837.", 1.0), ("4837", 1.0), (" 48371", 0.0), (" the 4837", 0.0), ("", 0.0), (None, 0.0)],
)
def test_exact_answers(text: str | None, expected: float) -> None:
    assert score(EXACT, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("BKQ holds 48213", 1.0), ("bkq", 0.5), ("__import__('os').system('true')", 0.0), ("\u202e48213", 0.5)],
)
def test_answers_that_contain(text: str, expected: float) -> None:
    assert score(SEVERAL, text) == expected


@pytest.mark.parametrize(("text", "expected"), [("It is lake gosk.", 1.0), ("Gosk", 1.0), ("Lake", 0.0), (None, 0.0)])
def test_one_of_several_answers(text: str | None, expected: float) -> None:
    assert score(ONE_OF, text) == expected


@given(st.text(st.characters(codec=None)))
def test_any_text_has_a_score(text: str) -> None:
    assert 0 <= score(EXACT, text) <= 1
    assert 0 <= score(SEVERAL, text * 50) <= 1
