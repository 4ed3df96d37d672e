# SPDX-License-Identifier: Apache-2.0
"""Published files: found in a folder, or fetched at a commit and checked."""

from __future__ import annotations

import hashlib
import json
import re
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from kvpress_eval.common.errors import DataError
from kvpress_eval.tasks.data_files import Content, HubFile, read_published
from kvpress_eval.tasks.kinds.gsm8k import TEST_SET
from kvpress_eval.tasks.longbench.data import VERSION_2, QuestionRow, version_1
from kvpress_eval.tasks.structures.passages import HOTPOTQA, SQUAD

BYTES = b'{"a": 1}\n{"a": 2}\n'
FILE = HubFile(
    ("first.jsonl", "second.parquet"),
    "rows with a",
    "who/what",
    "c0ffee",
    "folder/data.jsonl",
    hashlib.sha256(BYTES).hexdigest(),
)
PINNED = [TEST_SET, VERSION_2.file, version_1("trec", QuestionRow).file, SQUAD.file, HOTPOTQA.file]


def values(content: Content) -> list[Any]:
    return [row for _, row in content.rows()]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the cache of the hub's client."""
    path = tmp_path / "cached"
    path.write_bytes(BYTES)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *place, **which: str(path))
    return path


@pytest.mark.parametrize("file", PINNED, ids=lambda file: file.repository)
def test_every_file_is_pinned(file: HubFile) -> None:
    assert re.fullmatch("[0-9a-f]{40}", file.revision)
    assert re.fullmatch("[0-9a-f]{64}", file.sha256)


def test_the_first_name_that_is_there_is_read(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"a": [1, 2]}), tmp_path / "second.parquet")
    content = read_published(FILE, tmp_path)
    assert list(content.rows()) == [(f"{tmp_path}/second.parquet: row {n}", {"a": n}) for n in (1, 2)]
    assert content.sha256 == hashlib.sha256((tmp_path / "second.parquet").read_bytes()).hexdigest()
    (tmp_path / "first.jsonl").write_bytes(BYTES)
    assert list(read_published(FILE, tmp_path).rows()) == [(f"{tmp_path}/first.jsonl:{n}", {"a": n}) for n in (1, 2)]


def test_the_error_of_an_empty_folder_names_the_file_and_its_place(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        read_published(FILE, tmp_path)
    assert str(error.value) == (
        f"no such file: place it at {tmp_path}/first.jsonl, or there as second.parquet; it is folder/data.jsonl of "
        "https://huggingface.co/datasets/who/what at c0ffee, rows with a"
    )
    assert error.value.exit_code == 3
    (tmp_path / "first.jsonl").mkdir()
    with pytest.raises(DataError, match=r"cannot read .*first\.jsonl"):
        read_published(FILE, tmp_path)


def test_rows_of_every_form() -> None:
    assert values(Content(BYTES, "x")) == values(Content(b' [{"a": 1},\n{"a": 2}]', "x")) == [{"a": 1}, {"a": 2}]
    assert values(Content('{"a": "one\u2028two"}'.encode(), "x")) == [{"a": "one\u2028two"}]
    assert values(Content(b"", "x")) == []


@pytest.mark.parametrize(
    ("raw", "problem"),
    [(b'{"a": 1}\n{', "x:2: not JSON"), (b"[1", "x: not JSON"), (b"PAR1 or not", "x: not a Parquet file")],
)
def test_damage_is_named(raw: bytes, problem: str) -> None:
    with pytest.raises(DataError, match=re.escape(problem)):
        values(Content(raw, "x"))


def test_a_commit_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fetched").write_bytes(BYTES)
    requests = []

    def fetch(*place: str, **which: str) -> str:
        requests.append((*place, which))
        return str(tmp_path / "fetched")

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *place, **which: None)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url, timeout: None)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert values(read_published(FILE, None)) == [{"a": 1}, {"a": 2}]
    assert requests == [("who/what", "folder/data.jsonl", {"repo_type": "dataset", "revision": "c0ffee"})]


def test_other_bytes_than_the_pinned_ones_are_refused(hub: Path) -> None:
    assert values(read_published(FILE, None)) == [{"a": 1}, {"a": 2}]
    hub.write_bytes(BYTES[:-1])
    with pytest.raises(DataError, match=f"{hub} has the SHA-256 [0-9a-f]+, not {FILE.sha256}: delete it"):
        read_published(FILE, None)


def test_a_member_of_an_archive(hub: Path) -> None:
    with zipfile.ZipFile(hub, "w") as archive:
        archive.writestr("in/side.jsonl", json.dumps({"a": 3}))
    file = replace(FILE, member="in/side.jsonl", sha256=hashlib.sha256(hub.read_bytes()).hexdigest())
    content = read_published(file, None)
    assert values(content) == [{"a": 3}]
    assert content.sha256 == hashlib.sha256(b'{"a": 3}').hexdigest()
    with pytest.raises(DataError, match=r"cannot fetch other in folder/data\.jsonl of https://"):
        read_published(replace(file, member="other"), None)


def test_without_network_the_answer_comes_soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing listens at that port, as where a proxy is gone; the client itself would try five times."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(
        DataError, match=r"cannot fetch folder/data\.jsonl .* give --data-dir FOLDER and place it at FOLDER/first"
    ):
        read_published(FILE, None)
    assert time.monotonic() - start < 10
