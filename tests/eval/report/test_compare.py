# SPDX-License-Identifier: Apache-2.0
"""Comparison of two presses: kept tokens, answers of finished runs, page and command."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval.common.errors import DataError
from kvpress_eval.report.compare import LEVELS, TokenDifference, print_answers, token_difference
from kvpress_eval.results.answer_pairs import AnswerComparison, canonical, compare_answers
from kvpress_eval.results.cells import CellResult
from rich.console import Console

from tests.eval.commands import invoke

TEXT = "The code for paint is 8392. A school and a valley falls slowly. The rough shadow travels within the king."


def kept(*heads: str, tokens: str = "abcde") -> dict[str, Any]:
    """Return a record of kept tokens; a head is text with the letters of the tokens that it keeps."""
    bits = [sum(1 << (7 - tokens.index(token)) for token in head) for head in heads]
    return {"tokens": list(tokens), "heads": [[f"{number:02x}" for number in bits]]}


@pytest.fixture
def difference() -> TokenDifference:
    return token_difference(kept("abc", "ab"), kept("ade", "d"))


def test_pairs_are_counted_head_by_head(difference: TokenDifference) -> None:
    # Head 0: a in both, bc in the first, de in the second. Head 1: ab in the first, d in the second, ce in neither.
    assert difference.both.tolist() == [0.5, 0, 0, 0, 0]
    assert difference.only[0].tolist() == [0.5, 1, 0.5, 0, 0]
    assert difference.only[1].tolist() == [0, 0, 0, 1, 0.5]
    assert difference.shares == pytest.approx({"both": 0.1, "first": 0.4, "second": 0.3, "neither": 0.2})


def test_a_token_belongs_to_the_press_that_keeps_it_in_more_heads(difference: TokenDifference) -> None:
    half = LEVELS // 2
    assert difference.pieces == [
        ("a", "first", half), ("b", "first", LEVELS), ("c", "first", half), ("d", "second", LEVELS), ("e", "second", half)
    ]  # fmt: skip
    same = token_difference(kept("ab", "c"), kept("ac", "b"))
    assert [piece[1] for piece in same.pieces] == ["both", "both", "both", "none", "none"]


def test_passages_are_runs_of_tokens_of_one_press() -> None:
    difference = token_difference(kept("abe", "ab"), kept("c", "c"))
    assert difference.passages(0) == [(2.0, "ab"), (0.5, "e")]
    assert difference.passages(1) == [(1.0, "c")]


def cell(press: str, *answers: tuple[str, str | None, float | None], **spec: Any) -> CellResult:
    rows = [
        {"sample": sample, "expected": ["1"], "prediction": text, "score": score, "status": "ok"}
        for sample, text, score in answers
    ]
    conditions = {"model": "m", "task": "vt", "length": 64, "press": press, **spec}
    return CellResult(conditions, len(rows), rows, None, None)


def test_answers_are_paired_by_sample() -> None:
    cells = [
        cell("snapkv:0.5", ("s0", "1", 1.0), ("s1", "2", 0.0), ("s2", "same", 0.5), ("s4", "1", 1.0)),
        cell("knorm:0.5", ("s0", "3", 0.0), ("s1", None, None), ("s2", "same", 0.5), ("s3", "1", 1.0)),
        cell("knorm:0.5", ("s0", "never", 0.0), length=128),
    ]
    comparison = compare_answers(cells, "snapkv:compression_ratio=0.5", "knorm:0.5")
    assert [pair.sample for pair in comparison.pairs] == ["s0", "s1", "s2"]
    assert [pair.sample for pair in comparison.differing] == ["s0", "s1"]
    assert comparison.better == (1, 0)
    assert comparison.pairs[0].texts == ("1", "3")
    assert comparison.pairs[0].place == "vt 64"


def test_presses_without_common_samples_are_refused() -> None:
    cells = [cell("snapkv:0.5", ("s0", "1", 1.0)), cell("knorm:0.5", ("s0", "1", 1.0), length=128)]
    with pytest.raises(DataError, match="never measured under the same conditions"):
        compare_answers(cells, "snapkv:0.5", "knorm:0.5")
    with pytest.raises(DataError, match=r"'tova:0.5' was not measured; the runs have knorm:0.5, snapkv:0.5"):
        compare_answers(cells, "snapkv:0.5", "tova:0.5")


def test_a_press_that_is_not_registered_keeps_its_spec() -> None:
    assert canonical("my_own:0.5  + kivi") == "my_own:0.5 + kivi"


def test_equal_answers_are_a_sentence() -> None:
    console = Console(file=io.StringIO(), width=200)
    print_answers(("a", "b"), AnswerComparison([]), console)
    assert console.file.getvalue() == (  # type: ignore[attr-defined]
        "0 samples that both answered: 0 answers differ; 0 with a higher score of a, 0 of b\n"
    )


def test_the_command_compares_a_text_and_a_run(copied: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "text.txt", tmp_path / "compare.html"
    source.write_text(TEXT)
    code, output = invoke(
        "compare",
        "none",
        "random:0.5",
        "--text",
        str(source),
        "--run",
        str(copied),
        "--out",
        str(out),
        "--threads",
        "1",
    )
    assert code == 0, output
    # Each head of `random` keeps 12 of 25 tokens.
    for line in (r"both +48\.0", r"none only +52\.0", r"random:0\.5 only +0\.0", r"neither +0\.0"):
        assert re.search(f"kept by {line}", output), output
    assert "6 samples that both answered" in output
    page = out.read_text()
    assert page.count('data-owner="first"') > 5
    assert "niah_single-256-0-0" in page or "vt-256-0-0" in page
    assert page.count("<script") == 1


def test_a_run_alone_needs_no_model(copied: Path, tmp_path: Path) -> None:
    out = tmp_path / "compare.html"
    code, output = invoke(
        "compare", "none", "random:0.5", "--run", str(copied), "--out", str(out), "--model", "no-such-model"
    )
    assert code == 0, output
    assert "Answers" in out.read_text()
    assert "Tokens of" not in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("knorm:0.5", "snapkv:0.5"), 2, "give --text FILE, --run FOLDER, or both"),
        (("knorm:0.5", "snapkv:0.5", "--run", ".", "--tokens", "64"), 2, "tokens cuts the text of --text"),
        (("knorm:0.5", "knorm:compression_ratio=0.5", "--run", "."), 2, "are the same press"),
        (("knorm:0.5", "snapkw:0.5", "--text", "none.txt"), 2, "snapkv"),
        (("knorm:0.5", "snapkv:0.5", "--text", "none.txt"), 3, "cannot read none.txt"),
        (("knorm:0.5", "snapkv:0.5", "--run", "none"), 3, "none is not the folder of a run"),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result, output = invoke("compare", *arguments)
    assert (result, message in output) == (code, True), output
    assert not (tmp_path / "compare.html").exists()
