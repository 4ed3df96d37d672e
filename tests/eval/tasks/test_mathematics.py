# SPDX-License-Identifier: Apache-2.0
r"""MATH-500 and AIME: the last \boxed{...} decides."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvpress_eval.common.errors import ConfigError, DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.runner import run
from kvpress_eval.tasks.catalogue import expand_tasks
from kvpress_eval.tasks.kinds import mathematics
from kvpress_eval.tasks.kinds.mathematics import boxed, equivalent, same_integer
from rich.console import Console

from tests.eval.jsonl import write_lines


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{12}", "12"),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{3} and \boxed{never closed", "3"),
        ("12", None),
        (r"\boxed12", None),
    ],
)
def test_the_last_box_that_closes(text: str, expected: str | None) -> None:
    assert boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (r"\boxed{33}", 1.0), (r"\boxed{033}", 1.0), (r"\boxed{$33$.}", 1.0), (r"\boxed{\text{ 33 }}", 1.0),
        (r"\boxed{330}", 0.0), (r"\boxed{33, 34}", 0.0), (r"\boxed{-33}", 0.0), (r"\boxed{33.0}", 0.0), ("33", 0.0), ("", 0.0),
    ],
)  # fmt: skip
def test_whole_numbers(text: str, right: float) -> None:
    assert same_integer(text, ("33",)) == right
    assert same_integer(text, ("033",)) == right


def test_thousands() -> None:
    assert same_integer(r"\boxed{1" + 2000 * ",111" + "}", ("1",)) == 0.0  # more digits than Python converts
    assert same_integer(r"\boxed{1{,}234}", ("1234",)) == same_integer(r"\boxed{1,234}", ("1234",)) == 1.0
    assert same_integer(r"\boxed{12,34}", ("1234",)) == 0.0


@pytest.mark.parametrize(
    ("text", "right", "equal"),
    [
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{(3, \pi/2)}", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
        (r"\boxed{11}", "10", 0.0),
        ("", "10", 0.0),
    ],
)
def test_equal_as_mathematics(text: str, right: str, equal: float) -> None:
    pytest.importorskip("math_verify")
    assert equivalent(text, (right,)) == equal


def write(folder: Path, answer: object) -> Path:
    write_lines(folder / "aime25.jsonl", {"problem": "What is 2 + 2?", "answer": answer}, {"problem": "?", "answer": 7})
    return folder


def test_problems_run_end_to_end(tmp_path: Path, quiet: Console) -> None:
    config = RunConfig(
        tasks=("aime25",),
        data_dir=write(tmp_path / "data", "4"),
        samples=2,
        max_new_tokens=4,
        threads=1,
        out=tmp_path / "run",
    )
    (cell,) = run(config, quiet).cells
    assert [row["expected"] for row in cell.rows] == [["4"], ["7"]]
    assert cell.scores == {"aime25-0": 0.0, "aime25-1": 0.0}
    (source,) = expand_tasks(config.model_copy(update={"max_new_tokens": None}))
    assert source.max_new_tokens == 16384


def test_rows_that_are_no_problems_are_named(tmp_path: Path) -> None:
    config = RunConfig(tasks=("aime25",), data_dir=write(tmp_path / "data", "pi"))
    with pytest.raises(DataError, match=r"aime25\.jsonl:1: .*integer of up to 3 digits, got 'pi'"):
        expand_tasks(config)


def test_without_math_verify_it_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mathematics.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(
        ConfigError, match=r"math500 is scored by math-verify: pip install 'kvpress-toolkit\[benchmarks\]'"
    ):
        expand_tasks(RunConfig(tasks=("math500",), data_dir=tmp_path))
