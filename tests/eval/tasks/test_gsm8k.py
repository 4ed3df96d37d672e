# SPDX-License-Identifier: Apache-2.0
"""GSM8K: final numbers, the published forms of its data, and presses that act while the answer is written."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from kvpress_eval import evaluate
from kvpress_eval.common.errors import ConfigError, DataError
from kvpress_eval.config.load import load_config
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.cells import make_cells
from kvpress_eval.run.prompts import make_prompt
from kvpress_eval.tasks.catalogue import expand_tasks
from kvpress_eval.tasks.kinds.gsm8k import TEMPLATE, find_number, read_problems, score_number
from transformers import PreTrainedTokenizerBase

from tests.eval.jsonl import write_lines

ROWS = [
    {"question": "Ann has {3} apples\u2028and buys 4. How many?", "answer": "3+4 = <<3+4=7>>7 apples.\n#### 7"},
    {"question": "How much is 1,000 + 250?", "answer": "It is $1,250.\n#### 1,250"},
    {"question": "What is 2 - 5?", "answer": "#### -3"},
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "data" / "test.jsonl", *ROWS).parent


@pytest.mark.parametrize(
    ("answer", "text", "score"),
    [
        ("18", "She makes 9 * 2 = $18.\n#### 18", 1),
        ("18", "#### 18\n\nQuestion: How much is 1 + 1?\nAnswer: #### 2", 1),
        ("18", "18 it is.\n\nQuestion: How much is 1 + 1?\nAnswer: 2", 1),
        ("18", "#### $18.00", 1),
        ("18", "#### **18**.", 1),
        ("18", "#### 18 of the 20 eggs", 1),
        ("18", "#### 17\n#### 18", 0),
        ("18", "####\nso she makes 18.", 1),
        ("18", "The answer is \\boxed{18}.", 1),
        ("18", "The answer is 18, not 20", 0),
        ("18", "#### 180", 0),
        ("18", "#### 1.8", 0),
        ("18", "#### -18", 0),
        ("18", "eighteen", 0),
        ("18", "", 0),
        ("1250", "#### 1,250", 1),
        ("1250", "in all $1,250.00.", 1),
        ("1250", "250 more than 1,000 is 1250", 1),
        ("-3", "#### -3", 1),
        ("-3", "It is \u22123.", 1),
        ("3", "It is 5-3", 1),
        ("0.5", "#### .50", 1),
        ("7", "- 7", 1),
    ],
)
def test_scores(answer: str, text: str, score: float) -> None:
    assert score_number(text, (answer,)) == score


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1,000,000 and 12", ("1000000", "12")),
        ("first 1,2,3", ("1", "3")),
        ("$-5 or -$6", ("-5", "-6")),
        ("2024-2025", ("2024", "2025")),
        ("x=-3.25.", ("-3.25", "-3.25")),
    ],
)
def test_numbers_in_a_text(text: str, numbers: tuple[str, str]) -> None:
    assert (find_number(text), find_number(text, last=True)) == tuple(map(Decimal, numbers))
    assert find_number("none") is None


def test_the_worked_examples_end_as_they_ask_to() -> None:
    *worked, last = TEMPLATE.split("Question: ")[1:]
    assert last == "{question}\nAnswer:"
    for example in worked:
        steps, _, number = example.rstrip().rpartition("\n#### ")
        assert find_number(steps, last=True) == Decimal(number)
        for term, result in re.findall(r"([\d.]+(?: [-+*/] [\d.]+)+) = ([\d.]+)", steps):
            assert eval(term) == Decimal(result)  # noqa: S307  # digits and signs of our own text


def test_both_published_forms(data: Path, tmp_path: Path) -> None:
    lines = read_problems(data)
    assert lines.problems == [(ROWS[0]["question"], "7"), (ROWS[1]["question"], "1250"), (ROWS[2]["question"], "-3")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "gsm8k.parquet")
    table = read_problems(tmp_path)
    assert table.problems == lines.problems
    assert table.sha256 != lines.sha256


@pytest.mark.parametrize(
    "row",
    [
        [],
        {"question": "How many?"},
        {"question": "How many?", "answer": "7"},
        {"question": "How many?", "answer": "#### many"},
        {"question": 7, "answer": "#### 7"},
    ],
)
def test_another_row_is_named(data: Path, row: Any) -> None:
    write_lines(data / "test.jsonl", ROWS[0], row)
    with pytest.raises(DataError, match=r"test\.jsonl:2: not a row of GSM8K: needs question and answer"):
        read_problems(data)


def test_an_empty_file_is_refused(data: Path) -> None:
    write_lines(data / "test.jsonl")
    with pytest.raises(DataError, match="holds no question"):
        read_problems(data)


def test_a_folder_without_the_file(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=rf"place it at {tmp_path}/gsm8k\.jsonl, or there as test\.jsonl .*openai/gsm8k at 7403"
    ):
        expand_tasks(RunConfig(tasks=("gsm8k",), data_dir=tmp_path))


def test_a_misspelt_name_is_corrected() -> None:
    with pytest.raises(ConfigError, match="did you mean gsm8k"):
        load_config(None, {"tasks": ("gsm8",)})


def test_prompts(data: Path, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    config = RunConfig(tasks=("gsm8k",), samples=2, data_dir=data)
    (task,) = expand_tasks(config)
    samples = task.make(byte_tokenizer)
    assert [sample.id for sample in samples] == task.ids == ["gsm8k-0", "gsm8k-1"]
    expected = TEMPLATE.replace("{question}", ROWS[0]["question"])
    for question_aware in (False, True):
        prompt = make_prompt(byte_tokenizer, samples[0], question_aware=question_aware)
        assert byte_tokenizer.decode(prompt.first + prompt.second) == expected
        assert byte_tokenizer.decode(prompt.second) == ":"
    byte_tokenizer.chat_template = "<user>{{ messages[0].content }}</user><bot>"
    try:
        prompt = make_prompt(byte_tokenizer, samples[0], question_aware=False)
        assert byte_tokenizer.decode(prompt.first) == f"<user>{expected}"
        assert byte_tokenizer.decode(prompt.second) == "</user><bot>"
    finally:
        byte_tokenizer.chat_template = None


def test_one_cell_named_by_the_data(data: Path, tmp_path: Path) -> None:
    config = RunConfig(tasks=("gsm8k",), lengths=(512, 1024), data_dir=data)

    def cells(**change: Any) -> list[str]:
        changed = config.model_copy(update=change)
        return [cell.id for cell in make_cells(changed, expand_tasks(changed), "w", "cpu", "bfloat16")]

    base = cells()
    assert len(base) == 1
    # Neither lengths nor seeds change a question.
    assert cells(lengths=(64,), seed=1, max_new_tokens=512) == base
    assert cells(max_new_tokens=64) != base
    (cell,) = make_cells(config, expand_tasks(config), "w", "cpu", "bfloat16")
    assert cell.label == "none on gsm8k"
    write_lines(data / "test.jsonl", *ROWS[:2])
    assert cells() != base


def test_answers_are_compressed_while_they_are_written(data: Path, tmp_path: Path) -> None:
    """Nothing is evicted from the prompt, so the caches differ at the end only by evictions while decoding."""
    size = 64
    press = f"decoding(knorm):compression_interval=8,target_size={size}"
    rows = evaluate(
        "reference",
        ["none", press],
        ["gsm8k"],
        samples=2,
        max_new_tokens=24,
        threads=1,
        data_dir=data,
        out=tmp_path / "run",
    )
    records = rows if isinstance(rows, list) else rows.to_dict("records")
    assert [row["sample"] for row in records] == ["gsm8k-0", "gsm8k-1"] * 2
    assert {row["status"] for row in records} == {"ok"}
    assert {row["length"] for row in records} == {0}
    for row in records:
        pair = row["uncompressed_bytes"] / row["context_tokens"]
        assert row["bytes"] == row["uncompressed_bytes"]
        assert row["new_tokens"] > 8
        length = row["context_tokens"] + row["new_tokens"]
        assert row["end_uncompressed_bytes"] / pair == pytest.approx(length, abs=1)
        if row["press"] == "none":
            assert row["end_bytes"] >= row["end_uncompressed_bytes"]
        else:
            assert size <= row["end_bytes"] / pair < size + 8 + 1
