# SPDX-License-Identifier: Apache-2.0
"""One file for models x presses x ratios x tasks x lengths, checked before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvpress_eval.common.errors import ConfigError
from kvpress_eval.config.grid import expand_ratios, load_grid


def write(folder: Path, text: str) -> Path:
    path = folder / "grid.yaml"
    path.write_text(text)
    return path


def test_every_model_gets_a_run_with_every_ratio(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "models: [reference, somewhere/model, reference]\n"
        "presses: [none, snapkv, 'adakv(knorm:{ratio}) + kivi:bits=4', 'knorm:0.9', h2o]\n"
        "ratios: [0.25, 0.5]\ntasks: [vt]\nlengths: [64, 128]\nsamples: 7\n",
    )
    first, second = load_grid(path, {"samples": 3})
    assert (first.model, second.model) == ("reference", "somewhere/model")
    assert first.model_copy(update={"model": second.model}) == second
    assert (first.lengths, first.samples) == ((64, 128), 3)
    assert first.presses == (
        "none",
        "snapkv:0.25",
        "snapkv:0.5",
        "adakv(knorm:0.25) + kivi:bits=4",
        "adakv(knorm:0.5) + kivi:bits=4",
        "knorm:0.9",
        "h2o:0.25",
        "h2o:0.5",
    )


def test_a_plain_configuration_is_a_grid_of_one(tmp_path: Path) -> None:
    path = write(tmp_path, "model: reference\npresses: [none]\n")
    assert [run.model for run in load_grid(path, {})] == ["reference"]
    assert [run.model for run in load_grid(path, {"models": ["other"]})] == ["other"]
    assert [run.model for run in load_grid(None, {})] == ["reference"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [a]\nmodel: b\n", "give model or models, not both"),
        ("models: reference\n", "models: expected a list with at least one item, got 'reference'"),
        ("ratios: []\n", "ratios: expected a list"),
        ("ratios: [0.5]\npresses: ['kivi:bits=4', 'snapkv:0.25']\n", "go to no press"),
        ("ratios: [0.5, 1.5]\npresses: [snapkv]\n", "press 'snapkv:1.5'"),
        ("presses: ['snapkv:{ratio}']\n", "snapkv:{ratio}"),
        ("ratio: [0.5]\n", "grid.yaml:1: unknown key 'ratio': did you mean ratios"),
        ("samples: 3\nmodels: [reference]\ntasks: [vtt]\n", "grid.yaml:3: tasks: unknown task 'vtt'"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_grid(write(tmp_path, text), {})
    assert message in str(error.value)


@pytest.mark.parametrize("spec", ["none", "kivi", "quest", "nothing"])
def test_presses_without_a_ratio_come_once(spec: str) -> None:
    specs: Any = expand_ratios([spec, "knorm"], [0.5, 0.75])
    assert specs == [spec, "knorm:0.5", "knorm:0.75"]
