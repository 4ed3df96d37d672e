# SPDX-License-Identifier: Apache-2.0
"""No command replaces a file without --force, nor ever a file that it reads."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from kvpress_eval.common.errors import OutputError
from kvpress_eval.console import app
from kvpress_eval.report.write import NAMES
from kvpress_eval.tuning import result
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import kvpress
from kvpress.cli.outputs import check_outputs

SENTENCE = " The code for tiger is 4837. The old river runs."
READING = ("--model", "reference", "--text", "{text}")
COMMANDS: dict[str, tuple[str, ...]] = {
    "compress": ("compress", *READING, "--press", "knorm:0.5"),
    "calibrate": ("calibrate", "qfilter", "--model", "reference", "--data", "{text}", "--sequences", "1", "--tokens", "16"),
    "show": ("show", *READING, "--press", "knorm:0.5", "--tokens", "40"),
    "fidelity": ("fidelity", *READING, "--press", "knorm:0.5", "--context", "32", "--tokens", "4", "--samples", "1"),
    "reselect": ("reselect", *READING, "--budget", "8", "--skip-layers", "1", "--context", "32", "--tokens", "4",
                 "--samples", "1"),
    "recall": ("recall", "--model", "reference", "--language", "english", "--filler", "file:{text}", "--press", "knorm:0.5",
               "--lengths", "400", "--contexts", "1", "--facts", "1"),
}  # fmt: skip
LINKS: dict[str, Callable[[Path, Path], None]] = {
    "itself": lambda source, out: None,
    "symbolic": lambda source, out: out.symlink_to(source),
    "hard": lambda source, out: os.link(source, out),
}


def run(text: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [argument.format(text=text) for argument in arguments])


def printed(done: Result) -> str:
    return " ".join(done.output.split())


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(SENTENCE * 12)
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_is_there_is_kept(
    command: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "thesis.txt"
    out.write_text("years of work")
    with monkeypatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **kwargs: pytest.fail("it was loaded"))
        done = run(text, *COMMANDS[command], "--out", str(out))
    assert done.exit_code == 4
    assert "thesis.txt exists: name another --out, or replace it with --force" in printed(done)
    assert out.read_text() == "years of work"
    replaced = run(text, *COMMANDS[command], "--out", str(out), "--force")
    assert replaced.exit_code == 0, replaced.output
    assert b"years of work" not in out.read_bytes()


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("command", COMMANDS)
def test_an_input_is_never_replaced(command: str, link: str, text: Path, tmp_path: Path) -> None:
    out = text if link == "itself" else tmp_path / "other.txt"
    LINKS[link](text, out)
    done = run(text, *COMMANDS[command], "--out", str(out), "--force")
    assert done.exit_code == 4
    assert f"{out.name} is also read, as" in printed(done)
    assert text.read_text() == SENTENCE * 12


def test_weights_of_the_model_are_inputs_too(text: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(kvpress.reference_path(), tmp_path / "model"))
    before = (folder / "model.safetensors").stat()
    for out in (folder / "model.safetensors", folder / "config.json"):
        done = run(
            text,
            "compress",
            "--model",
            str(folder),
            "--press",
            "none",
            "--text",
            "{text}",
            "--out",
            str(out),
            "--force",
        )
        assert done.exit_code == 4
        assert "is also read" in printed(done)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    check_outputs([tmp_path / "new"], ["Qwen/Qwen3-8B", folder], force=False)


def test_files_beside_a_table_of_heads_are_kept_too(text: Path, tmp_path: Path) -> None:
    (tmp_path / "heads.json").write_text("{}")
    arguments = ("kvzip_heads", "--model", "reference", "--data", "{text}")
    done = run(text, "calibrate", *arguments, "--out", str(tmp_path / "heads.tsv"))
    assert done.exit_code == 4
    assert "heads.json exists" in printed(done)


def test_a_report_replaces_its_own_pages_and_no_others(text: Path, tmp_path: Path) -> None:
    figures, folder = tmp_path / "figures.json", tmp_path / "pages"
    folder.mkdir()
    assert run(text, *COMMANDS["fidelity"], "--out", str(figures)).exit_code == 0
    before = figures.read_bytes()
    (folder / "table.md").write_text("years of work")
    refused = run(text, "report", str(figures), "--out", str(folder / "report.html"))
    assert refused.exit_code == 4
    assert "table.md exists" in printed(refused)
    assert (folder / "table.md").read_text() == "years of work"
    assert not (folder / "report.html").exists()
    for force in (["--force"], []):  # the second time, the page is one that the command wrote
        assert run(text, "report", str(figures), "--out", str(folder / "report.html"), *force).exit_code == 0
    assert "is also read" in printed(run(text, "report", str(figures), "--out", str(figures), "--force"))
    assert figures.read_bytes() == before
    page = tmp_path / "show.html"
    for _ in range(2):
        assert run(text, *COMMANDS["show"], "--out", str(page)).exit_code == 0


@pytest.mark.parametrize("command", ["eval", "demo", "tune"])
def test_a_folder_with_other_files_is_refused_before_any_work(command: str, text: Path, tmp_path: Path) -> None:
    name = "reference.json" if command == "demo" else "table.tex"
    (tmp_path / name).write_text("years of work")
    arguments = {"eval": ("--press", "none"), "demo": ("--model", "reference"), "tune": ("--smaller", "2")}[command]
    done = run(text, command, *arguments, "--out", str(tmp_path))
    assert done.exit_code == 4
    assert f"{name} exists" in printed(done)
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, "text.txt"]


def test_a_search_does_not_take_over_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "press.yaml").write_text("mine")
    with pytest.raises(OutputError, match=r"holds press\.yaml, which no search has written: use a new --out"):
        result.belong(tmp_path / result.IDENTITY, {"model": "reference"})
    (tmp_path / "press.yaml").unlink()
    result.belong(tmp_path / result.IDENTITY, {"model": "reference"})
    assert json.loads((tmp_path / result.IDENTITY).read_text()) == {"model": "reference"}
    assert NAMES[0] == "report.html"
