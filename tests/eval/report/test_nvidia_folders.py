# SPDX-License-Identifier: Apache-2.0
"""Results are exported in the folders of NVIDIA's `evaluate.py`, with its names, and only under one set of conditions."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import yaml
from kvpress_eval.common.errors import DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.report.nvidia_folders import PRESSES, named_press, to_folders
from kvpress_eval.results.read import read_run
from kvpress_eval.run.runner import RunResult

import kvpress
from tests.eval.commands import invoke
from tests.eval.reports import folder_of

FIELDS = {
    "dataset", "data_dir", "model", "device", "press_name", "compression_ratio", "key_channel_compression_ratio",
    "head_compression_ratio", "threshold", "fraction", "max_new_tokens", "max_context_length", "query_aware", "needle_depth",
    "compression_interval", "target_size", "hidden_states_buffer_size", "output_dir", "log_level", "model_kwargs",
    "trust_remote_code", "press_init_command", "seed", "fp8",
}  # fmt: skip
"""Fields of `EvaluationConfig` of NVIDIA kvpress 0.5.5, which refuses others."""


def test_every_press_and_task_gets_its_folder_with_the_scores_of_the_run(
    finished: tuple[RunConfig, RunResult], tmp_path: Path
) -> None:
    config, result = finished
    out = tmp_path / "results"
    code, text = invoke("leaderboard", config.out, "--out", out)
    assert code == 0, text
    names = ["kvpress-toolkit__256__reference__no_press__0.00", "kvpress-toolkit__256__reference__random__0.50",
             "ruler__256__reference__no_press__0.00", "ruler__256__reference__random__0.50"]  # fmt: skip
    assert sorted(path.name for path in out.iterdir()) == names
    for cell in result.cells:
        dataset = "ruler" if cell.task == "vt" else "kvpress-toolkit"
        folder = out / f"{dataset}__256__reference__{'no_press__0.00' if cell.press == 'none' else 'random__0.50'}"
        mean = sum(cell.scores.values()) / len(cell.scores)
        metric = "string_match" if dataset == "ruler" else "score"
        assert json.loads((folder / "metrics.json").read_text()) == {cell.task: {metric: round(100 * mean, 2)}}
        stored = yaml.safe_load((folder / "config.yaml").read_text())
        assert set(stored) <= FIELDS
        assert stored["compression_ratio"] == (0.0 if cell.press == "none" else 0.5)
        assert stored["press_init_command"] == f"kvpress.get_press({cell.press!r})"
        with (folder / "predictions.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["predicted_answer"] for row in rows] == [row["prediction"] for row in cell.rows]
        assert [float(row["score"]) for row in rows] == [row["score"] for row in cell.rows]


def test_an_unfinished_cell_is_left_out_and_named(copied: Path, tmp_path: Path) -> None:
    (folder_of(copied, "random:0.5", "vt") / "done.json").unlink()
    code, text = invoke("leaderboard", copied, "--out", tmp_path / "results")
    assert code == 0
    assert "left out random:0.5 on vt 256: unfinished" in " ".join(text.split())
    assert not (tmp_path / "results" / "ruler__256__reference__random__0.50").exists()


def test_folders_that_are_there_are_kept(finished: tuple[RunConfig, RunResult], tmp_path: Path) -> None:
    arguments = ("leaderboard", finished[0].out, "--out", tmp_path)
    assert invoke(*arguments)[0] == 0
    code, text = invoke(*arguments)
    assert code != 0
    assert "exists" in text
    assert invoke(*arguments, "--force")[0] == 0


def test_cells_of_different_conditions_do_not_share_a_folder(copied: Path) -> None:
    spec = folder_of(copied, "none", "niah_single") / "cell.json"
    spec.write_text(json.dumps({**json.loads(spec.read_text()), "task": "cwe", "seed": 9}))
    with pytest.raises(DataError, match=r"ruler__256__reference__no_press__0\.00 were measured under .*seed"):
        to_folders(read_run(copied).cells)


@pytest.mark.parametrize(
    ("spec", "name", "settings"),
    [
        ("none", "no_press", {"compression_ratio": 0.0}),
        ("snapkv:0.5", "snapkv", {"compression_ratio": 0.5}),
        ("adakv(snapkv:0.5)", "adakv_snapkv", {"compression_ratio": 0.5}),
        ("adakv(expected_attention:0.5,epsilon=0.01)", "expected_attention", {"compression_ratio": 0.5}),
        ("expected_attention:0.5", "expected_attention-press", {"compression_ratio": 0.5}),
        ("duo_attention:0.25", "duo_attention", {"head_compression_ratio": 0.25}),
        ("think:0.5", "think", {"key_channel_compression_ratio": 0.5}),
        ("snapkv:budget=1024", "snapkv-budget=1024", {}),
        ("kivi:bits=4", "kivi-bits=4", {}),
        ("quest:budget=64 + kivi:bits=4", "quest-budget=64+kivi-bits=4", {}),
    ],
)
def test_presses_have_the_names_of_nvidias_registry_or_those_of_their_specs(
    spec: str, name: str, settings: dict[str, float]
) -> None:
    named = named_press(spec)
    assert (named.name, named.settings) == (name, settings)
    assert "__" not in named.name


def test_every_name_of_the_registry_is_of_a_press_here() -> None:
    specs = {kvpress.to_spec(kvpress.get_press(spec)) for spec in PRESSES.values()}
    assert len(specs) == len(PRESSES)
