# SPDX-License-Identifier: Apache-2.0
"""InfiniteBench, LooGLE and SCBench: scores as the published code gives them, rows as they are published, runs of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpress_eval.common.errors import ConfigError, DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.runner import run
from kvpress_eval.tasks.catalogue import expand_tasks
from kvpress_eval.tasks.kinds import infinitebench, loogle, scbench
from kvpress_eval.tasks.source import Source
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from tests.eval.commands import invoke
from tests.eval.jsonl import write_lines

Score = Callable[[str, Sequence[str]], float]

GOLDEN: list[tuple[Score, str, tuple[str, ...], float]] = [
    (infinitebench.first_number, "It is 71432. 5", ("71432",), 1.0),
    (infinitebench.first_number, "1, 71432", ("71432",), 0.0),
    (infinitebench.among_words, '"key": "a-b".', ("a-b",), 1.0),
    (infinitebench.among_words, "a-bc", ("a-b",), 0.0),
    (infinitebench.returned, "The value is `-7`.", ("-7",), 1.0),
    (infinitebench.returned, "7 it is", ("7",), 0.0),
    (infinitebench.erroneous_function, "B. parse", ("parse", "B"), 1.0),
    (infinitebench.erroneous_function, "B parse", ("parse", "B"), 0.0),  # without a full stop or a colon
    (infinitebench.erroneous_function, "The answer is: **parse**", ("parse", "B"), 1.0),
    (infinitebench.erroneous_function, "The answer is: Option B, not A", ("parse", "B"), 1.0),
    (infinitebench.erroneous_function, "The answer is: A, not B", ("parse", "B"), 0.0),
    (infinitebench.erroneous_function, "It is B", ("parse", "B"), 0.0),
    (infinitebench.choice, "Bananas, of course", ("a dog", "B"), 1.0),  # the first letter counts alone
    (infinitebench.choice, "a dog", ("a dog", "B"), 1.0),
    (infinitebench.choice, "the answer is B", ("a dog", "B"), 1.0),
    (infinitebench.choice, "the answer is C, not B", ("a dog", "B"), 0.0),
    (infinitebench.choice, "of AB and B", ("a dog", "B"), 0.0),  # "AB" is a part of "ABCD"
    (infinitebench.character, "it is john.", ("JOHN",), 1.0),
    (infinitebench.character, "johnny", ("JOHN",), 0.0),
    (infinitebench.best_f1, "The red house", ("a blue house", "house"), 2 / 3),
    (infinitebench.best_f1_chinese, "红房子。", ("红房",), 0.8),
    (infinitebench.found_number, "it is 12", ("12",), 1.0),
    (infinitebench.found_number, "3.50", ("3.5",), 1.0),
    (infinitebench.found_number, "12.0", ("12",), 0.0),
    (infinitebench.intermediate_values, "[2, -7, 5]", ("2", "7", "4"), 2 / 3),
    (infinitebench.intermediate_values, "no", ("2",), 0.0),
    (infinitebench.intermediate_values, "02, 7" + 5000 * "0", ("2", "7"), 0.5),  # more digits than Python converts
    (loogle.cloze, "{'<mask-0>': 'Bob', '<mask-1>': 'Rome'}", ('{"<mask-0>": "Bob", "<mask-1>": "Paris"}',), 0.5),
    (loogle.cloze, '{"<mask-0>": "Bob"}', ('{"<mask-0>": "Bob"}',), 1.0),
    (loogle.cloze, "Sure: {'<mask-0>': 'Bob'}", ('{"<mask-0>": "Bob"}',), 0.0),
    (loogle.cloze, "dict([('<mask-0>', 'Bob')])", ('{"<mask-0>": "Bob"}',), 0.0),  # never run
    (loogle.recall, "the cat sat down", ("the cat ran",), 2 / 3),
    (loogle.recall, "", ("None",), 1.0),
    (scbench.contains, "x=ab.", ("ab",), 1.0),
    (scbench.mentions, "It was LONDON", ("Paris", "london"), 1.0),
    (scbench.share, "VAR a, b", ("A", "b", "zz"), 0.67),
    (scbench.extreme, "12.9", ("12",), 1.0),
    (scbench.extreme, "12.9", ("12.5",), 0.0),
    (scbench.extreme, 5000 * "1", ("12",), 0.0),
]


@pytest.mark.parametrize(("score", "text", "answers", "expected"), GOLDEN)
def test_scores_are_the_published_ones(score: Score, text: str, answers: tuple[str, ...], expected: float) -> None:
    assert score(text, answers) == pytest.approx(expected)


def test_summaries_are_scored_by_lines() -> None:
    pytest.importorskip("rouge_score")
    # The longest common subsequences of lines: 2 of 3 words, and 1 of 2.
    assert infinitebench.summary("a b x\nd e", ("a b c\nd f",)) == pytest.approx(3 / 5)


@given(st.text(st.characters(codec=None), max_size=60))
def test_any_text_has_a_score(text: str) -> None:
    for score, _, answers, _ in GOLDEN:
        assert 0 <= score(text, answers) <= 1


BOOK = " ".join(f"Line {number} tells of lake {number}." for number in range(40))
ROWS: dict[str, list[Any]] = {
    "passkey.jsonl": [{"id": 0, "context": BOOK, "input": "What?", "answer": ["71432"], "options": []}],
    "math_find.jsonl": [{"id": 0, "context": "[3, 9]", "input": "Find the largest.", "answer": [9], "options": []}],
    "longbook_choice_eng.jsonl": [
        {"id": 0, "context": BOOK, "input": "Who?", "answer": ["Ed"], "options": ["Al", "Bo", "Cy", "Ed"]}
    ],
    "shortdep_qa.jsonl": [
        {"input": BOOK, "qa_pairs": "[{'Q': 'Which?', 'A': 'lake 3', 'S': []}, {'Q': 'And?', 'A': '5'}]", "output": ""}
    ],
    "longdep_qa.jsonl": [
        {"context": BOOK, "question": f"Q{number}?", "answer": "a lake", "doc_id": "d", "id": number} for number in range(2)
    ],
    "longdep_summarization.jsonl": [{"input": BOOK, "title": "t", "qa_pairs": "none", "output": "Lakes."}],
    "shortdep_cloze.jsonl": [{"input": BOOK, "qa_pairs": "[{'Q': '<mask-0> swam.', 'A': \"{'<mask-0>': 'Bob'}\"}]"}],
    "scbench_kv.jsonl": [
        {"id": 0, "context": BOOK, "multi_turns": [{"input": f"Key {n}?", "answer": f"v{n}"} for n in range(3)]}
    ],
    "scbench_mf.jsonl": [{"id": 0, "context": "[3, 9]", "multi_turns": [{"input": "The largest is", "answer": 9}]}],
    "scbench_vt.jsonl": [{"id": 0, "input": BOOK, "multi_turns": [{"input": "Which?", "answer": ["A", "B"]}]}],
}  # fmt: skip
TASKS = (
    "infinitebench:passkey", "infinitebench:math_find", "infinitebench:longbook_choice_eng", "loogle:shortdep_qa",
    "loogle:longdep_qa", "loogle:longdep_summarization", "loogle:shortdep_cloze", "scbench:kv", "scbench:kv:turns",
    "scbench:mf", "scbench:vt",
)  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, rows in ROWS.items():
        write_lines(tmp_path / "data" / name, *rows)
    return tmp_path / "data"


def source(task: str, data: Path, length: int = 2000, samples: int = 50) -> Source:
    (task_source,) = expand_tasks(RunConfig(tasks=(task,), lengths=(length,), samples=samples, data_dir=data))
    return task_source


def test_every_row_becomes_its_questions(data: Path, reference_tokenizer: PreTrainedTokenizerBase) -> None:
    counts = {task: len(source(task, data).make(reference_tokenizer)) for task in TASKS}
    assert counts == {
        **dict.fromkeys(TASKS, 1), "loogle:shortdep_qa": 2, "loogle:longdep_qa": 2, "scbench:kv": 3, "scbench:kv:turns": 3
    }  # fmt: skip
    (choice,) = source("infinitebench:longbook_choice_eng", data).make(reference_tokenizer)
    assert choice.query.answers == ("Ed", "D")
    assert "D. Ed" in choice.query.question
    assert [sample.query.answers for sample in source("loogle:shortdep_qa", data).make(reference_tokenizer)] == [
        ("lake 3",),
        ("5",),
    ]
    assert json.loads(source("loogle:shortdep_cloze", data).make(reference_tokenizer)[0].query.answers[0]) == {
        "<mask-0>": "Bob"
    }
    assert source("infinitebench:passkey", data).max_new_tokens == 6


def test_questions_share_their_context_and_turns_follow_each_other(
    data: Path, reference_tokenizer: PreTrainedTokenizerBase
) -> None:
    alone = source("scbench:kv", data, length=400).make(reference_tokenizer)
    turns = source("scbench:kv:turns", data, length=400).make(reference_tokenizer)
    for samples in (alone, turns):
        assert len({sample.context for sample in samples}) == 1
        prompts = [sample.context + sample.query.question for sample in samples]
        assert all(len(reference_tokenizer(prompt)["input_ids"]) <= 402 for prompt in prompts)
    assert "Key 0?" not in alone[2].query.question
    assert turns[2].query.question.index("Key 0?\n v0") < turns[2].query.question.index("Key 1?\n v1")
    assert turns[2].query.question.endswith("Key 2?\n")


def test_they_run_end_to_end(data: Path, quiet: Console, tmp_path: Path) -> None:
    config = RunConfig(
        presses=("none", "knorm:0.5"), tasks=TASKS, lengths=(200,), samples=2, data_dir=data, max_new_tokens=4, threads=1,
        out=tmp_path / "run",
    )  # fmt: skip
    result = run(config, quiet)
    assert result.exit_code == 0
    assert {cell.task for cell in result.cells} == set(TASKS)
    kv = next(cell for cell in result.cells if cell.task == "scbench:kv:turns" and cell.press == "knorm:0.5")
    assert len(kv.rows) == 2
    # Both turns were answered behind one reading of the context.
    assert len({row["measured"]["prefill_seconds"] for row in kv.rows}) == 1


@pytest.mark.parametrize(
    ("task", "row", "message"),
    [
        ("infinitebench:passkey", {"context": "x", "answer": ["1"]}, "missing: 'input'"),
        ("infinitebench:passkey", {"context": "x", "input": "?", "answer": []}, "answer must be"),
        (
            "infinitebench:longbook_choice_eng",
            {"context": "x", "input": "?", "answer": ["a"], "options": ["a", "b"]},
            "options must be 4, not 2",
        ),
        ("loogle:shortdep_qa", {"input": "x", "qa_pairs": "__import__('os')"}, "malformed node"),
        ("scbench:kv", {"context": "x", "multi_turns": []}, "at least one turn"),
        ("scbench:kv", "text", "string indices"),
    ],
)
def test_a_row_of_another_form_is_named(task: str, row: Any, message: str, tmp_path: Path) -> None:
    kinds = (infinitebench, loogle, scbench)
    published = next(kind.TASKS[task] for kind in kinds if task in kind.TASKS)
    path = write_lines(tmp_path / "data" / published.file.names[0], row)
    with pytest.raises(DataError, match=rf"{path}:1: not a row of {task} \(.*{message}"):
        source(task, tmp_path / "data")


def test_without_a_fixed_revision_nothing_is_fetched() -> None:
    with pytest.raises(DataError, match=r"no fixed revision is known .*SCBench.* give --data-dir .*scbench_kv\.jsonl"):
        expand_tasks(RunConfig(tasks=("scbench:kv",), lengths=(512,)))


def test_lengths_must_be_given(data: Path) -> None:
    with pytest.raises(ConfigError, match="loogle:longdep_qa needs lengths"):
        expand_tasks(RunConfig(tasks=("loogle:longdep_qa",), data_dir=data))


def test_an_unknown_subset_names_the_nearest(tmp_path: Path) -> None:
    code, output = invoke("eval", "--tasks", "infinitebench:pass_key", "--out", tmp_path)
    assert code == 2
    assert "did you mean passkey" in output
