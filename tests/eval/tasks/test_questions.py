# SPDX-License-Identifier: Apache-2.0
"""Questions about passages, in the forms that SQuAD and HotpotQA are published in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from kvpress_eval.common.errors import DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.cells import make_cells
from kvpress_eval.tasks.catalogue import expand_tasks
from kvpress_eval.tasks.kinds.generated import generate
from kvpress_eval.tasks.languages import LANGUAGES
from kvpress_eval.tasks.questions import PassageQuestion, PublishedQuestions, read_questions
from kvpress_eval.tasks.structures.passages import HOTPOTQA, SQUAD
from transformers import PreTrainedTokenizerBase

from tests.eval.jsonl import to_lines, write_lines

OPEN = {
    "question": "How long?",
    "answers": [{"text": "2 km"}, {"text": "2 km"}, {"text": "two"}],
    "is_impossible": False,
}
CLOSED = {"question": "Who?", "answers": [], "is_impossible": True}
PUBLISHED_SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Pier",
            "paragraphs": [
                {"context": "It is 2 km.", "qas": [OPEN, CLOSED]},
                {"context": "It burnt.", "qas": [CLOSED]},
            ],
        },
        {"title": "Mill", "paragraphs": [{"context": "It is old.", "qas": [CLOSED]}]},
    ],
}
HUB_SQUAD = [
    {"title": "Pier", "context": "It is 2 km.", "question": "How long?", "answers": {"text": ["2 km", "two"]}},
    {"title": "Pier", "context": "It burnt.", "question": "Who?", "answers": {"text": []}},
]
FROM_SQUAD = PassageQuestion("How long?", ("2 km", "two"), ("It is 2 km.",), ("It burnt.",))

PUBLISHED_HOTPOT = {
    "question": "Where?",
    "answer": "Ulm",
    "context": [["A", ["a is", " b."]], ["B", ["b is in Ulm."]], ["C", ["c."]]],
    "supporting_facts": [["A", 0], ["B", 0], ["B", 1]],
}
HUB_HOTPOT = {
    **PUBLISHED_HOTPOT,
    "context": {"title": ["A", "B", "C"], "sentences": [["a is", " b."], ["b is in Ulm."], ["c."]]},
    "supporting_facts": {"title": ["A", "B", "B"], "sent_id": [0, 0, 1]},
}
FROM_HOTPOT = PassageQuestion("Where?", ("Ulm",), ("A\na is b.", "B\nb is in Ulm."), ("C\nc.",))


@pytest.mark.parametrize(
    ("source", "name", "text", "expected"),
    [
        (SQUAD, "squad.json", json.dumps(PUBLISHED_SQUAD), FROM_SQUAD),
        (SQUAD, "dev-v2.0.json", json.dumps(PUBLISHED_SQUAD), FROM_SQUAD),
        (SQUAD, "squad.jsonl", to_lines(HUB_SQUAD), FROM_SQUAD),
        (HOTPOTQA, "hotpotqa.json", json.dumps([PUBLISHED_HOTPOT]), FROM_HOTPOT),
        (HOTPOTQA, "hotpot_dev_distractor_v1.json", json.dumps([HUB_HOTPOT]), FROM_HOTPOT),
        (HOTPOTQA, "hotpotqa.jsonl", to_lines([HUB_HOTPOT]), FROM_HOTPOT),
    ],
)
def test_published_forms(
    source: PublishedQuestions, name: str, text: str, expected: PassageQuestion, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    assert read_questions(source, tmp_path).questions == (expected,)


@pytest.mark.parametrize(
    ("source", "name", "row", "expected"),
    [
        (SQUAD, "squad.parquet", HUB_SQUAD[0], replace(FROM_SQUAD, near=())),
        (HOTPOTQA, "hotpotqa.parquet", HUB_HOTPOT, FROM_HOTPOT),
    ],
)
def test_the_form_of_the_hub(
    source: PublishedQuestions, name: str, row: dict[str, Any], expected: PassageQuestion, tmp_path: Path
) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / name)
    assert read_questions(source, tmp_path).questions == (expected,)


def test_a_folder_without_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=f"place it at {tmp_path}/hotpotqa.json, or there as hotpotqa.jsonl .*hotpot_qa at 1908d6"
    ):
        expand_tasks(RunConfig(tasks=("qa_2",), language="english", data_dir=tmp_path))


@pytest.mark.parametrize("text", ["not json", "[1]", '[{"title": 1}]', '{"data": 3}', "[]", '{"articles": []}'])
def test_a_file_of_another_form(text: str, tmp_path: Path) -> None:
    (tmp_path / "squad.json").write_text(text)
    with pytest.raises(DataError, match=r"squad\.json"):
        read_questions(SQUAD, tmp_path)


def test_the_questions_decide_the_cell(tmp_path: Path) -> None:
    config = RunConfig(tasks=("qa_1",), lengths=(512,), language="english", data_dir=tmp_path)

    def cell_id(rows: list[Any]) -> str:
        write_lines(tmp_path / "squad.jsonl", *rows)
        (cell,) = make_cells(config, expand_tasks(config), "w", "cpu", "bfloat16")
        return cell.id

    assert cell_id(HUB_SQUAD) == cell_id(HUB_SQUAD)
    assert cell_id(HUB_SQUAD) != cell_id(HUB_SQUAD[:1])


def test_a_question_whose_passage_is_too_long_makes_room_for_the_next(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    long = {"title": "Fair", "context": "x" * 900, "question": "What?", "answers": {"text": ["x"]}}
    write_lines(tmp_path / "squad.jsonl", long, *HUB_SQUAD)
    questions = read_questions(SQUAD, tmp_path)
    samples = generate("qa_1", byte_tokenizer, 200, 4, language=LANGUAGES["english"], questions=questions)
    assert {sample.query.answers for sample in samples} == {FROM_SQUAD.answers}
    assert all("It burnt." in sample.context for sample in samples)
    with pytest.raises(ValueError, match="length 20 is too short"):
        generate("qa_1", byte_tokenizer, 20, 1, language=LANGUAGES["english"], questions=questions)
