# SPDX-License-Identifier: Apache-2.0
"""Rows of LongBench are read as published; damaged or missing files are named."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled
from kvpress_eval.common.errors import DataError
from kvpress_eval.tasks.longbench.data import Classified, PublishedRows, QuestionRow, read_rows, version_1

from tests.eval.jsonl import write_lines
from tests.eval.tasks.longbench.rows import choice, expand, question


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("{", r":2: not JSON"),
        ("", r":2: not JSON"),
        ("[]", r":2: not a LongBench row \(row: "),
        (json.dumps({"_id": "x"}), r":2: not a LongBench row \(context: Field required"),
        (json.dumps(question(1, answers=[])), r":2: not a LongBench row \(answers: "),
        (json.dumps(question(1, answers=["x", 1])), r":2: not a LongBench row \(answers\.1: "),
        (json.dumps(question(1, all_classes=None)), r":2: not a LongBench row \(all_classes: "),
        (json.dumps(question(0)), r":2: the _id 'id0' is that of .*trec\.jsonl:1 too"),
    ],
)
def test_a_damaged_line_is_named(data: Path, damage: str, problem: str) -> None:
    (data / "trec.jsonl").write_text(json.dumps(question(0)) + "\n" + damage + "\n")
    with pytest.raises(DataError, match=r"trec\.jsonl" + problem):
        expand("longbench:trec", data)


def test_bytes_that_are_no_text_are_refused(data: Path) -> None:
    (data / "trec.jsonl").write_bytes(b'{"input": "\xff"}\n')
    with pytest.raises(DataError, match=r"trec\.jsonl:1: not JSON"):
        expand("longbench:trec", data)


def test_line_separators_inside_a_text_do_not_end_a_row(data: Path) -> None:
    write_lines(data / "trec.jsonl", question(0, context="one\u2028two\x85three"))
    assert read_rows(version_1("trec", Classified), data).rows[0].context == "one\u2028two\x85three"


def test_version_2_is_one_array_as_published(data: Path) -> None:
    lines = expand("longbench-v2", data)[0]
    (data / "longbench-v2.json").write_text(json.dumps([choice(0), choice(1, difficulty="easy")], indent=1))
    array = expand("longbench-v2", data)[0]
    assert array.ids == lines.ids
    (data / "longbench-v2.json").write_text(json.dumps([choice(0), choice(1, answer="E")]))
    with pytest.raises(DataError, match=r"longbench-v2\.json: row 2: not a LongBench row \(answer: "):
        expand("longbench-v2", data)


def test_the_error_of_a_missing_file_names_the_file_and_its_place(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        expand("longbench:qasper", tmp_path)
    message = str(error.value)
    assert f"place it at {tmp_path}/qasper.jsonl" in message
    assert "data/qasper.jsonl in data.zip of https://huggingface.co/datasets/zai-org/LongBench at 5e628be" in message
    assert "_id, context, input, answers, length, all_classes" in message


def test_without_network_the_message_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(url: str, timeout: float) -> None:
        assert url.startswith("https://huggingface.co/datasets/zai-org/LongBench-v2/resolve/2b48e494")
        raise OfflineModeIsEnabled("offline\nand more")

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *place, **which: None)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", fail)
    with pytest.raises(
        DataError, match=r"\(offline\); .* place it at FOLDER/longbench-v2\.json: .* choice_A, choice_B"
    ):
        expand("longbench-v2", None)


def test_a_subset_comes_from_the_archive(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "data.zip"
    with zipfile.ZipFile(archive, "w") as members:
        members.write(data / "trec.jsonl", "data/trec.jsonl")
    file = replace(version_1("trec", Classified).file, sha256=hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *place, **which: str(archive))
    from_hub, from_folder = (read_rows(PublishedRows(file, Classified), folder) for folder in (None, data))
    assert (from_hub.rows, from_hub.sha256) == (from_folder.rows, from_folder.sha256)
    with pytest.raises(DataError, match=r"cannot fetch data/lcc\.jsonl in data\.zip"):
        read_rows(PublishedRows(replace(file, member="data/lcc.jsonl"), QuestionRow), None)
