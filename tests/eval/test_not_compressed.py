# SPDX-License-Identifier: Apache-2.0
"""A press that compressed nothing is refused before a run, or marked in the output of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvpress_eval.common.errors import ConfigError
from kvpress_eval.config.grid import expand_ratios
from kvpress_eval.config.load import load_config

from tests.eval.commands import invoke
from tests.eval.jsonl import write_lines

WHOLE = "kivi:bits=4,residual_length=128"


@pytest.mark.parametrize(
    ("press", "written"), [("snapkv", "snapkv:0.5"), ("adakv(snapkv)", "adakv(snapkv:0.5)"), ("knorm:0", "knorm:0.5")]
)
def test_a_press_without_a_ratio_is_no_run(press: str, written: str, tmp_path: Path) -> None:
    code, output = invoke("eval", "--press", press, "--tasks", "vt", "--out", tmp_path / "run")
    assert code == 2
    assert f"compresses nothing: write {written}, or none" in output
    assert not (tmp_path / "run").exists()


def test_a_wrapper_that_ratios_miss_is_refused() -> None:
    assert expand_ratios(["none", "snapkv", "kivi:bits=4"], [0.5]) == ["none", "snapkv:0.5", "kivi:bits=4"]
    with pytest.raises(ConfigError, match=r"write adakv\(snapkv:0.5\), .* or where \{ratio\} stands"):
        expand_ratios(["snapkv", "adakv(snapkv)"], [0.5])


def test_a_run_marks_caches_that_stayed_whole(tmp_path: Path) -> None:
    options = ("--tasks", "vt", "--lengths", 64, "--samples", 1, "--max-new-tokens", 2, "--threads", 1)
    presses = [part for press in ("none", WHOLE, "quest:budget=16", "knorm:0.5") for part in ("--press", press)]
    code, output = invoke("eval", *presses, *options, "--out", tmp_path)
    assert code == 0, output
    assert f"{WHOLE} on vt at 64: nothing is compressed" in " ".join(output.split())
    assert f"{WHOLE}: not compressed: 1 of 1 contexts are held as they are" in " ".join(output.split())
    rows = [json.loads(path.read_text()) for path in tmp_path.glob("cells/*/rows.jsonl")]
    assert sorted(row["compressed"] for row in rows) == [False, True, True, True]
    table = (tmp_path / "table.md").read_text()
    assert [("not compressed" in line) for line in table.splitlines() if line.startswith("| ")][2:].count(True) == 1
    assert (
        "frontier names no size, and takes smaller=10"
        in invoke("eval", "--press", "frontier", *options, "--dry-run")[1]
    )


def test_fidelity_marks_caches_that_stayed_whole(tmp_path: Path) -> None:
    options = ("--context", 64, "--tokens", 4, "--samples", 1, "--threads", 1, "--out", tmp_path / "out.json")
    code, output = invoke("fidelity", "--press", WHOLE, "--press", "quest:budget=16", *options)
    assert code == 0, output
    assert f"{WHOLE}: not compressed" in output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["compressed"] for row in rows] == [False, True]


def test_samples_of_a_file_past_the_positions_fail_alone(tmp_path: Path) -> None:
    long = {"context": " The old river runs." * 1200, "question": "\nWhat runs?", "answer": "river"}
    write_lines(tmp_path / "mine.jsonl", long)
    options = ("--samples", 1, "--max-new-tokens", 2, "--threads", 1, "--out", tmp_path / "run")
    code, output = invoke("eval", "--press", "none", "--tasks", f"file:{tmp_path / 'mine.jsonl'}", *options)
    assert code == 1
    assert "over the 4096 positions that LlamaForCausalLM was made for: shorten it" in " ".join(output.split())


def test_lengths_may_have_a_unit() -> None:
    assert load_config(None, {"lengths": ["1k", 512], "max_new_tokens": "2k"}).lengths == (1024, 512)
    with pytest.raises(ConfigError, match=r"lengths\.0: a number of tokens must be an integer such as 4096, 8k"):
        load_config(None, {"lengths": ["1kb"]})
