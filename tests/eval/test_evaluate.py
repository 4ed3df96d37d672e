# SPDX-License-Identifier: Apache-2.0
"""`kvpress_eval.evaluate`: the harness from Python, with names or with loaded models and presses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval import evaluate
from kvpress_eval.common.errors import ConfigError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.runner import RunResult

import kvpress

FIELDS: dict[str, Any] = {"lengths": [64], "samples": 2, "threads": 1, "max_new_tokens": 4}


def test_rows_of_a_finished_run(finished: tuple[RunConfig, RunResult], tmp_path: Path) -> None:
    config, _ = finished
    shutil.copytree(config.out, tmp_path / "run")
    fields = config.model_dump(exclude={"model", "presses", "tasks", "out"})
    report = tmp_path / "page" / "report.html"
    rows = evaluate("reference", config.presses, config.tasks, out=tmp_path / "run", report=report, **fields)
    assert "random:0.5" in report.read_text()
    assert (tmp_path / "page" / "frontier.svg").is_file()
    assert len(rows) == 2 * 2 * 3
    assert {"press", "task", "length", "score", "bytes", "end_bytes", "prefill_seconds"} <= set(rows.columns)


def test_a_loaded_model_and_presses_answer_like_names(tmp_path: Path) -> None:
    model, tokenizer = kvpress.load_model("reference")
    presses = [kvpress.get_press("none"), kvpress.SnapKVPress(0.5)]
    loaded = evaluate(model, presses, ["vt"], tokenizer=tokenizer, out=tmp_path / "loaded", **FIELDS)
    named = evaluate("reference", ["none", "snapkv:0.5"], ["vt"], out=tmp_path / "named", **FIELDS)
    columns = ["task", "sample", "prediction", "score", "bytes"]
    assert loaded[columns].equals(named[columns])


def test_other_weights_are_other_cells(tmp_path: Path) -> None:
    model, tokenizer = kvpress.load_model("reference")
    evaluate(model, ["none"], ["vt"], tokenizer=tokenizer, out=tmp_path, **FIELDS)
    model.model.layers[1].mlp.up_proj.weight.data.mul_(-1)
    evaluate(model, ["none"], ["vt"], tokenizer=tokenizer, out=tmp_path, **FIELDS)
    assert len(list((tmp_path / "cells").iterdir())) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "needs its tokenizer"),
        ({"tokenizer": 1, "dtype": "float32", "device": "cpu"}, "device, dtype cannot be chosen"),
    ],
)
def test_fields_that_a_loaded_model_does_not_take(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    model, _ = kvpress.load_model("reference")
    with pytest.raises(ConfigError, match=message):
        evaluate(model, ["none"], ["vt"], out=tmp_path / "run", **fields)
    assert not (tmp_path / "run").exists()
