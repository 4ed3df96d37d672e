# SPDX-License-Identifier: Apache-2.0
"""A press in a file equals the press, alone and inside others."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import kvpress


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "press.yaml"
    path.write_text("press: snapkv:0.5 + kivi:bits=4\ntuned:\n  model: reference\n")
    return path


@pytest.mark.parametrize("written", ["{}", "@{}", " @{} "])
def test_a_file_is_the_press_that_it_holds(file: Path, written: str) -> None:
    assert kvpress.get_press(written.format(file)) == kvpress.get_press("snapkv:0.5 + kivi:bits=4")


def test_a_file_is_a_part_of_a_composition(file: Path) -> None:
    press = kvpress.get_press(f"@{file} + quest:budget=64")
    assert press == kvpress.get_press("snapkv:0.5 + kivi:bits=4 + quest:budget=64")
    file.write_text("press: knorm:0.25\n")
    assert kvpress.get_press(f"adakv(@{file})") == kvpress.get_press("adakv(knorm:0.25)")


@pytest.mark.parametrize("key", ["press", None])
def test_plain_data_is_read_as_well(tmp_path: Path, key: str | None) -> None:
    press = kvpress.get_press("adakv(snapkv:0.5) + kivi:bits=(4,2)")
    data = kvpress.press_to_dict(press)
    path = tmp_path / "press.yml"
    path.write_text(yaml.safe_dump({key: data} if key else data))
    assert kvpress.get_press(str(path)) == press


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read a press from .*none.yaml: .*No such file"),
        ("press: [", "cannot read a press from"),
        ("model: reference", "holds no press: expected a line such as"),
        ("press: 3", "holds no press"),
        ("press: '@press.yaml'", "holds no press"),
        ("press: press.yaml", "holds no press"),
        ("press: snapkv:1.5", "compression_ratio must be"),
    ],
)
def test_a_file_without_a_press(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "none.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        kvpress.get_press(str(path))


def test_an_argument_may_end_like_a_file() -> None:
    press = kvpress.get_press("cq:bits=8,coupled=8,calibration=books.yaml")
    assert press == kvpress.CoupledQuantPress(bits=8, coupled=8, calibration="books.yaml")
