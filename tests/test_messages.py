# SPDX-License-Identifier: Apache-2.0
"""Messages name the fix, and commands accept input in the forms that users write."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvpress
from kvpress.cli import app
from kvpress.core.press import ScorerPress
from kvpress.counts import few, parse_count
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import RecentQueries
from tests.models import tiny_model, tokens

runner = CliRunner()


@pytest.mark.parametrize(
    ("text", "count"),
    [("4096", 4096), ("8k", 8192), ("128K", 131072), ("1M", 2**20), ("1.5k", 1536), (512, 512), ("0", 0)],
)
def test_numbers_of_tokens(text: Any, count: int) -> None:
    assert parse_count(text, least=0) == count


@pytest.mark.parametrize("text", ["8kb", "k", "-1", "1.5", "8 000", "", "1e3", "nan", None])
def test_invalid_numbers_of_tokens(text: Any) -> None:
    with pytest.raises(ValueError, match="context must be an integer such as 4096, 8k, 128k or 1M, got "):
        parse_count(text, "context")
    with pytest.raises(ValueError, match="context must be at least 16, got 8"):
        parse_count("8", "context", least=16)


def test_commands_take_units() -> None:
    arguments = ["plan", "--model", "reference", "--press", "none"]
    assert "1 x 2048 tokens" in runner.invoke(app, [*arguments, "--context", "2k"]).output
    refused = runner.invoke(app, [*arguments, "--context", "2kb"])
    assert refused.exit_code == 2
    assert "8k, 128k or 1M" in " ".join(refused.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("nonsense", None),
        ("press", None),
        ("snapkw", "snapkv"),
        ("kiwi", "kivi"),
        ("h20", "h2o"),
        ("frontire", "frontier"),
    ],
)
def test_only_near_names_are_offered(name: str, suggestion: str | None) -> None:
    with pytest.raises(KeyError) as unknown:
        kvpress.get_press(name)
    assert (
        (f"did you mean {suggestion}?" in str(unknown.value))
        if suggestion
        else ("did you mean" not in str(unknown.value))
    )


def test_long_lists_are_cut() -> None:
    assert few(range(3)) == "0, 1, 2"
    assert few(range(30)) == "0, 1, 2, 3, ... (30 in all)"
    with pytest.raises(ValueError, match=r"got 5, 9$"):
        kvpress.get_press("kivi:bits=(" + "4," * 28 + "5,9)")


QUERIES = Wanted(RecentQueries, 4)


@dataclass
class Forgetful(ScorerPress):
    """Reads queries, but does not list them."""

    def scores(self, view: Any) -> Any:
        return view.newest_queries(QUERIES).new_zeros(view.shape)


def test_a_forgotten_wish_is_named_inside_a_block() -> None:
    model = tiny_model("llama")
    with (
        Forgetful(0.5)(model),
        pytest.raises(ValueError, match="RecentQueries has recorded nothing: list it in `wants`"),
    ):
        model.generate(tokens(1, 32), max_new_tokens=1)


def test_a_press_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "mine_of_messages.py"
    path.write_text("print('imported')\n")
    done = runner.invoke(app, ["--import", str(path), "list"])
    assert done.exit_code == 0
    assert "imported" in done.output
    missing = runner.invoke(app, ["--import", str(tmp_path / "none.py"), "list"])
    assert missing.exit_code == 2
    assert "there is no file" in missing.output
    (tmp_path / "json.py").write_text("")
    result = runner.invoke(app, ["--import", str(tmp_path / "json.py"), "list"])
    assert result.exit_code == 2
    assert "json is the name of another module" in result.output


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["plan", "--model", "no/such/model"], 3),
        (["plan", "--model", "reference", "--press", "nonsense"], 2),
        (["info", "none.kv"], 3),
        (["compress", "--model", "reference", "--press", "knorm:0.5", "--text", "none.txt", "--out", "out.kv"], 3),
        (
            [
                "compress",
                "--model",
                "reference",
                "--press",
                "knorm:0.5",
                "--text",
                "none.txt",
                "--out",
                "no/folder/out.kv",
            ],
            4,
        ),
    ],
)
def test_a_fault_has_one_exit_code(
    arguments: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = runner.invoke(app, arguments)
    assert done.exit_code == code, done.output
