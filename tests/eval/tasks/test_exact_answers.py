# SPDX-License-Identifier: Apache-2.0
"""Tool calls and long answers: which answers are right, and that the context holds them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpress_eval.tasks.kinds.generated import generate
from kvpress_eval.tasks.languages import LANGUAGES
from kvpress_eval.tasks.sample import Sample, score
from kvpress_eval.tasks.structures.long_answers import lines_right
from kvpress_eval.tasks.structures.tool_calls import same_call
from transformers import PreTrainedTokenizerBase


def make(task: str, tokenizer: PreTrainedTokenizerBase, length: int = 3000) -> list[Sample]:
    return generate(task, tokenizer, length, 3, language=LANGUAGES["english"])


def test_the_context_holds_the_tool_and_the_record(reference_tokenizer: PreTrainedTokenizerBase) -> None:
    for sample in make("tool_call", reference_tokenizer):
        (right,) = sample.query.answers
        call = json.loads(right)
        sentences = [sample.context[start:stop] for start, stop in sample.spans]
        assert any(call["name"] in sentence and '"amount": "number"' in sentence for sentence in sentences)
        assert any(json.dumps(call["arguments"]) in sentence for sentence in sentences)
        assert call["name"] in sample.query.question
        assert score(sample.query, right) == score(sample.query, f"```json\n{json.dumps(call, indent=2)}\n```") == 1.0


CALL = {"name": "book_flight", "arguments": {"account": "0a-1", "amount": 7.0, "urgent": True, "items": [1, 2]}}


@pytest.mark.parametrize(
    "change",
    [
        {"account": "0a-2"}, {"amount": 7}, {"amount": "7.0"}, {"urgent": 1}, {"urgent": "true"}, {"items": [2, 1]},
        {"items": [1, 2, 3]}, {"more": 1},
    ],
)  # fmt: skip
def test_one_wrong_argument_is_a_wrong_call(change: dict[str, object]) -> None:
    wrong_call = {**CALL, "arguments": {**CALL["arguments"], **change}}  # type: ignore[dict-item]
    assert same_call(json.dumps(CALL), (json.dumps(CALL),)) == 1.0
    assert same_call(json.dumps(wrong_call), (json.dumps(CALL),)) == 0.0


def test_each_line_of_a_long_answer_counts(reference_tokenizer: PreTrainedTokenizerBase) -> None:
    for sample in make("long_answer", reference_tokenizer):
        values = sample.query.answers
        assert 4 <= len(values) <= 64
        assert all(value in sample.context for value in values)
        lines = [f"{number}. thing {value}" for number, value in enumerate(values, start=1)]
        assert score(sample.query, "\n".join(lines)) == 1.0
        assert score(sample.query, "\n".join(lines[:-1])) == pytest.approx(1 - 1 / len(values))
    assert len(make("long_answer", reference_tokenizer, 300)[0].query.answers) < len(values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1. a 55\n2. b 66", 1.0), ("**1** a: 55.\n\n- 2) b 66", 1.0), ("1. a 555\n2. b 66", 0.5), ("1. a\n1. a 55", 0.0),
        ("a 55 b 66", 0.0), ("", 0.0),
    ],
)  # fmt: skip
def test_a_value_counts_on_its_own_line(text: str, expected: float) -> None:
    assert lines_right(text, ("55", "66")) == expected


@given(st.text(st.characters(codec=None)))
def test_any_text_has_a_score(text: str) -> None:
    assert 0 <= same_call("{" + text, (json.dumps(CALL),)) <= 1
    assert 0 <= lines_right(text, ("55", "66")) <= 1
