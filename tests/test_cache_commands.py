# SPDX-License-Identifier: Apache-2.0
"""Commands that save a compressed text in a file and answer from it, as a user types them."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import kvpress
from kvpress.cache import container
from kvpress.cli import app
from kvpress.hf.generation.ask import ask
from kvpress.hf.refine import refine

FILLER = " The old river runs. The code for otter is 2951. The old house stands."
TEXT = FILLER * 20 + " The code for tiger is 4837." + FILLER * 10


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_a_text_is_compressed_once_and_questioned_later(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "text.kv"
    done = run("compress", "--model", "reference", "--press", "frontier:smaller=4", "--text", text, "--out", out)
    assert done.exit_code == 0, done.output
    assert "press    frontier:smaller=4" in done.stdout
    questions = ["What is the code for tiger?", "What is the code for otter?"]
    result = run("ask", "--model", "reference", "--cache", out, *questions, "--max-new-tokens", 12)
    assert result.exit_code == 0, result.output
    first, second = (result.stdout.split(question)[-1] for question in questions)
    assert "4837" in first.partition(questions[1])[0]
    assert "2951" in second
    info = kvpress.cache_info(out)
    assert f"{info.length} tokens" in result.stderr
    assert "loaded in" in result.stderr
    assert result.stderr.count("the first after") == 2
    model, tokenizer = kvpress.load_model("reference")
    cache, words = kvpress.load(out, model, tokenizer=tokenizer), []
    reply = ask(model, tokenizer, cache, questions[0], info.get_press(), max_new_tokens=12, write=words.append)
    assert "".join(words) == reply.text
    assert reply.text in result.stdout
    assert len(words) > 2
    assert reply.tokens <= 12
    assert 0 < reply.first_seconds <= reply.seconds
    assert cache.get_seq_length() == info.length


def test_info_prints_the_contents_of_a_file_and_verifies_it(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "text.kv"
    assert run("compress", "--model", "reference", "--press", "knorm:0.5", "--text", text, "--out", out).exit_code == 0
    result = run("info", out, "--verify")
    assert result.exit_code == 0
    assert "2.0 times smaller" in result.stdout
    assert "all digests match" in result.stdout
    content = bytearray(out.read_bytes())
    content[-100] ^= 1
    out.write_bytes(bytes(content))
    assert run("info", out).exit_code == 0
    damaged = run("info", out, "--verify")
    assert damaged.exit_code == 2
    assert "is damaged: block 'layers.3'" in damaged.stderr.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (("compress", "--press", "knorn:0.5", "--text", "{text}", "--out", "{folder}/a.kv"), "did you mean knorm", 2),
        (
            ("compress", "--press", "knorm:0.5", "--text", "{folder}/no.txt", "--out", "{folder}/a.kv"),
            "No such file",
            3,
        ),
        (("compress", "--press", "knorm:0.5", "--text", "{text}", "--out", "{folder}"), "is a folder", 4),
        (("compress", "--press", "knorm:0.5", "--text", "{text}", "--out", "{folder}/no/a.kv"), "does not exist", 4),
        (("compress", "--press", "knorm:0.5", "--text", "{empty}", "--out", "{folder}/a.kv"), "no text to read", 2),
        (
            ("compress", "--press", "knorm:0.5", "--text", "{text}", "--out", "{folder}/a.kv", "--refine", "0"),
            "--refine must be a number of minutes above 0, such as 10, got 0",
            2,
        ),
        (
            ("compress", "--press", "knorm:0.5", "--text", "{bytes}", "--out", "{folder}/a.kv"),
            "is not a text in UTF-8",
            2,
        ),
        (
            ("compress", "--press", "knorm:0.5", "--text", "{text}", "--out", "{folder}/a.kv", "--dtype", "int8"),
            "--dtype must be auto, bfloat16, float16 or float32, got 'int8'",
            2,
        ),
        (("ask", "--cache", "{text}", "Why?"), "not a file of kvpress", 2),
        (("ask", "--cache", "{folder}/no.kv", "Why?"), "there is no such file", 3),
    ],
)
def test_errors_are_one_sentence(
    arguments: tuple[str, ...], message: str, code: int, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff")
    there = sorted(tmp_path.iterdir())
    places = {"text": text, "folder": tmp_path, "empty": tmp_path / "empty.txt", "bytes": tmp_path / "bytes.txt"}
    done = run(*(argument.format(**places) for argument in arguments), "--model", "reference")
    assert done.exit_code == code
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.output
    assert sorted(tmp_path.iterdir()) == there


def test_an_output_that_cannot_be_written_has_an_exit_code_of_its_own(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "text.kv"
    command = ("compress", "--model", "reference", "--press", "knorm:0.8", "--text", text, "--out", out)
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(container.shutil, "disk_usage", lambda path: free)
        full = run(*command)
    assert full.exit_code == 7
    assert f"no space left for {out}: the file takes " in full.stderr.replace("\n", "")

    opened = Path.open

    def vanished(self: Path, *arguments: Any, **settings: Any) -> Any:
        if self.name.startswith(".text.kv"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(self))
        return opened(self, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", vanished)
        assert run(*command).exit_code == 4
        refined = run(*command, "--refine", 1)  # found before the training, not after a minute
    assert refined.exit_code == 4
    assert "KL before" in refined.stderr
    assert "Traceback" not in refined.output
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: path != tmp_path)
        assert "is read-only; name another --out" in run(*command).stderr.replace("\n", "")
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_refined_cache_is_an_ordinary_one(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_HELD", "_BATCH"):
        monkeypatch.setattr(refine, name, 2)
    out = tmp_path / "text.kv"
    command = ("compress", "--model", "reference", "--press", "knorm:0.8", "--text", text, "--out", out)
    done = run(*command, "--refine", 0.001)
    assert done.exit_code == 0, done.output
    assert re.search(r"held-out KL \d\.\d{4} before, \d\.\d{4} after \(4 questions and continuations", done.stdout)
    assert "read and refined in" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.kv", "text.txt"]
    result = run("ask", "--model", "reference", "--cache", out, "What is the code for tiger?", "--max-new-tokens", 4)
    assert result.exit_code == 0, result.output
    assert kvpress.cache_info(out).notes["refined"]["steps"] >= 1
