# SPDX-License-Identifier: Apache-2.0
"""The command that finds the layer in which TidalDecode chooses again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvpress_eval.commands.reselect import best, candidates
from kvpress_eval.common.errors import ConfigError, DataError
from transformers import Gemma3TextConfig

from kvpress.hf.models import facts_of
from kvpress.testing.models import random_model
from tests.eval import commands
from tests.models import FAMILIES


def invoke(*arguments: str) -> tuple[int, str]:
    return commands.invoke("reselect", "--samples", "2", "--context", "200", "--tokens", "12", *arguments)


def test_every_layer_that_may_choose_is_tried_and_the_closest_wins(tmp_path: Path) -> None:
    code, output = invoke("--budget", "8", "--skip-layers", "0", "--out", str(tmp_path / "new" / "found.json"))
    assert code == 0, output
    record = json.loads((tmp_path / "new" / "found.json").read_text())
    divergences = {row["press"]: row["kl_mean"] for row in record["rows"]}
    expected = {f"tidal_decode:budget=8,skip_layers=0,reselect_layer={layer}" for layer in (1, 2, 3)}
    assert set(divergences) == expected
    assert len(set(divergences.values())) == 3
    assert divergences[record["best"]] == min(divergences.values()) > 0
    assert f"best: {record['best']}" in output


def test_layers_without_a_growing_cache_are_left_out(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 4
    Gemma3TextConfig(num_hidden_layers=8, layer_types=kinds).save_pretrained(tmp_path)
    specs = candidates(str(tmp_path), 0.25, 2, "max")
    assert specs == [f"tidal_decode:budget=0.25,reselect_layer={layer},heads=max" for layer in (5, 7)]


def test_layers_are_numbered_as_the_press_numbers_them(tmp_path: Path) -> None:
    """Linear layers have no number: three attention layers among five are 0 to 2."""
    kinds = ["linear_attention", "full_attention", "full_attention", "linear_attention", "full_attention"]
    model = random_model("qwen3_next", **{**FAMILIES["qwen3_next"], "num_hidden_layers": 5, "layer_types": kinds})
    model.config.save_pretrained(tmp_path)
    specs = candidates(str(tmp_path), 0.25, 0, "mean")
    assert specs == [f"tidal_decode:budget=0.25,skip_layers=0,reselect_layer={layer}" for layer in (1, 2)]
    assert [layer.index for layer in facts_of(model).growing] == [0, 1, 2]


def test_the_smallest_divergence_is_best() -> None:
    assert best([{"press": "a", "kl_mean": 0.2}, {"press": "b", "kl_mean": 0.1}]) == "b"


def test_bad_arguments() -> None:
    for words, arguments in {
        "use a smaller skip_layers": ("reference", 64, 3, "mean"),
        "heads must be 'mean', 'max' or 'query'": ("reference", 64, 0, "sum"),
        "got 1.5": ("reference", 1.5, 0, "mean"),
    }.items():
        with pytest.raises(ConfigError, match=words):
            candidates(*arguments)
    with pytest.raises(DataError, match="cannot read the configuration of '/missing'"):
        candidates("/missing", 64, 0, "mean")
    code, output = invoke("--budget", "many")
    assert code != 0
    assert "budget must be an integer" in output
