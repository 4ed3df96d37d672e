# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from kvpress_eval.common.errors import ConfigError, DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.tasks.catalogue import expand_tasks
from kvpress_eval.tasks.kinds.files import read_file, split_source

from tests.eval.jsonl import write_lines


def row(task: str, length: int, answer: str) -> dict[str, object]:
    return {
        "task": task,
        "length": length,
        "context": f" The code for tiger is {answer}.",
        "question": "\nWhat is the code for tiger?",
        "answer_prefix": "The code for tiger is",
        "answer": answer,
    }


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    rows = [row("single", 512, "4837"), row("single", 1024, "1122"), row("mk4", 512, "0412")]
    return write_lines(tmp_path / "rows.jsonl", *rows)


def test_rows_become_samples(rows_file: Path) -> None:
    file = read_file(rows_file)
    assert file.tasks([]) == ["single", "mk4"]
    (sample,) = file.select("single", 1024)
    assert sample.id == "single-1024-0"
    assert sample.query.answers == ("1122",)
    assert [sample.context[start:end] for start, end in sample.spans] == ["1122"]


def test_gzip_reads_the_same(rows_file: Path) -> None:
    packed = rows_file.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(rows_file.read_bytes()))
    assert read_file(packed).samples == read_file(rows_file).samples


def test_a_run_takes_its_lengths_and_tasks_only(rows_file: Path) -> None:
    def expand(source: str, *lengths: int) -> list[tuple[str, int]]:
        sources = expand_tasks(RunConfig(tasks=(source,), lengths=lengths))
        return [(item.task, item.length) for item in sources]

    assert expand(f"file:{rows_file}", 512, 1024) == [("single", 512), ("single", 1024), ("mk4", 512)]
    assert expand(f"file:{rows_file}#mk4", 512) == [("mk4", 512)]
    with pytest.raises(ConfigError, match="it has 512, 1024"):
        expand(f"file:{rows_file}", 2048)
    with pytest.raises(ConfigError, match="unknown task 'mk5': choose from mk4, single"):
        expand(f"file:{rows_file}#mk5", 512)


def test_split_source() -> None:
    assert split_source("file:a/b.jsonl#x+y") == (Path("a/b.jsonl"), ["x", "y"])


def test_the_error_of_a_missing_file_names_its_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"place it at {tmp_path}/none.jsonl"):
        read_file(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "line", ["not json", "[]", "{}", '{"task": 1}', json.dumps(row("a", 1, "x") | {"length": "1"})]
)
def test_a_bad_row_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row("single", 512, "4837")) + "\n" + line + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl:2: not a task row"):
        read_file(path)


def test_damaged_gzip(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"{}")[:-4])
    with pytest.raises(DataError, match="cannot read"):
        read_file(path)


def test_missing_fields_have_defaults(tmp_path: Path) -> None:
    rows = [
        {"context": " It is 4837 or 12.", "question": "What is it?", "answer": ["4837", "12"]},
        {"context": " It is 4837.", "question": "What is it?", "answer": "4837", "answer_prefix": "It is"},
        {"context": " It is 4837.", "question": "What is it?", "answer": "4837", "match": "contains", "task": "own"},
    ]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    first, second, third = read_file(path).samples
    assert (first.task, first.length, first.query.match, first.query.answers) == ("data", 0, "any", ("4837", "12"))
    assert [first.context[start:end] for start, end in first.spans] == ["4837", "12"]
    assert (second.query.match, second.query.answer_prefix) == ("prefix", "It is")
    assert (third.task, third.query.match) == ("own", "contains")
    sources = expand_tasks(RunConfig(tasks=(f"file:{path}",), lengths=(512, 1024)))
    assert [(source.task, len(source.ids)) for source in sources] == [("data", 2), ("own", 1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": []}, "answer must be text, or a list of texts"),
        ({"answer": ""}, "answer must be text, or a list of texts"),
        ({"match": "exact"}, "match must be prefix, contains or any, got 'exact'"),
    ],
)
def test_values_that_a_row_does_not_take(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write_lines(tmp_path / "rows.jsonl", row("single", 512, "4837") | change)
    with pytest.raises(DataError, match=message):
        read_file(path)


def test_line_separators_inside_of_a_text_divide_no_row(tmp_path: Path) -> None:
    row = {"context": "one\u2028two\x85three", "question": "q?", "answer": "a"}
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for _ in range(2)), encoding="utf-8")
    assert [sample.context for sample in read_file(path).samples] == [row["context"]] * 2
    path.write_text("\ufeff" + path.read_text(encoding="utf-8"), encoding="utf-8")
    assert len(read_file(path).samples) == 2
