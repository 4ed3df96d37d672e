# SPDX-License-Identifier: Apache-2.0
"""Tasks of lm-eval on the reference model: HFLM's own numbers without a press, fewer bytes with one."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import kvpress

pytest.importorskip("lm_eval", reason="the extra lm-eval is not installed")

from kvpress_eval.common.errors import ConfigError
from kvpress_eval.lm import require, tasks
from kvpress_eval.lm.__main__ import main
from kvpress_eval.lm.model import KVPressLM
from kvpress_eval.report.comparison_tables import lm_scores
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from tests.eval.commands import invoke

DATA = Path(__file__).parents[3] / "benchmarks" / "data" / "refmodel_test.jsonl.gz"
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
PRESS = "expected_attention:0.5,n_sink=2"


@pytest.fixture(scope="module", autouse=True)
def _own_tasks_only() -> Iterator[None]:
    """Leave out the thousands of tasks of lm-eval, which take long to read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TaskManager.__init__, "__defaults__", (None, None, False, None))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write two tasks: one generates the answer, one chooses it among four."""
    folder = tmp_path_factory.mktemp("tasks")
    with gzip.open(DATA, "rt") as file:
        rows = [json.loads(line) for line in file]
    rows = [row for row in rows if row["task"] in ("single", "mk4") and row["length"] == 512][::14]
    with (folder / "rows.jsonl").open("w") as file:
        for number, row in enumerate(rows):
            others = [rows[(number + step) % len(rows)]["answer"] for step in (1, 2, 3)]
            choices = sorted({row["answer"], *others})
            # Prompts of different lengths: only then is there padding.
            prompt = row["context"][40 * number :] + f"{row['question']}\n{row['answer_prefix']}"
            gold = choices.index(row["answer"])
            file.write(json.dumps({"prompt": prompt, "answer": row["answer"], "choices": choices, "gold": gold}) + "\n")
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
    }
    generated = {
        **common,
        "task": "codes_generated",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 8},
        "filter_list": [{"name": "strip", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    chosen = {
        **common,
        "task": "codes_chosen",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    for task in (generated, chosen):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump(task))
    return folder


@cache
def loaded(folder: Path) -> list[Any]:
    """Load both tasks with their data once, which takes longer than answering."""
    names = ("codes_generated", "codes_chosen")
    return [task for group in tasks.load_tasks(tasks.Selection(names, folder), "none") for task in group]


@cache
def bundled() -> tuple[Any, Any]:
    return kvpress.load_model("reference", dtype=torch.float32)


def pressed_lm(press: str, **settings: Any) -> KVPressLM:
    """Return the bundled model under a press, as loaded by its name."""
    model, tokenizer = bundled()
    return KVPressLM(model, press, tokenizer=tokenizer, **settings)


def evaluate(lm: Any, folder: Path) -> dict[str, Any]:
    return simple_evaluate(lm, tasks=loaded(folder), bootstrap_iters=0)


def texts(result: dict[str, Any]) -> list[str]:
    return [sample["resps"][0][0] for sample in result["samples"]["codes_generated"]]


def likelihoods(result: dict[str, Any]) -> list[float]:
    return [choice[0][0] for sample in result["samples"]["codes_chosen"] for choice in sample["resps"]]


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    return evaluate(HFLM(kvpress.reference_path(), batch_size=4, **SETTINGS), folder)


@pytest.fixture(scope="module")
def pressed(folder: Path) -> tuple[KVPressLM, dict[str, Any]]:
    lm = pressed_lm(PRESS, batch_size=4)
    return lm, evaluate(lm, folder)


def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, args, index, metadata=("demo", index, 1)) for index, args in enumerate(arguments)]


def test_without_a_press_the_results_are_those_of_hflm(folder: Path, plain: dict[str, Any]) -> None:
    lm = KVPressLM("reference", "none", batch_size=4, **SETTINGS)
    result = evaluate(lm, folder)
    assert result["results"]["codes_generated"]["exact_match,strip"] >= 0.9
    assert result["results"]["codes_chosen"]["acc,none"] >= 0.9
    assert texts(result) == texts(plain)
    assert likelihoods(result) == pytest.approx(likelihoods(plain), abs=1e-3, rel=1e-4)
    assert lm.held.summary()["bits_per_value"] == pytest.approx(32, rel=0.05)


def test_a_press_acts_on_both_kinds_of_task(plain: dict[str, Any], pressed: tuple[KVPressLM, dict[str, Any]]) -> None:
    lm, result = pressed
    summary = lm.held.summary()
    assert summary["prompts"] == 2 * len(texts(plain))
    assert summary["bytes_per_prompt"] < 0.6 * summary["uncompressed_bytes_per_prompt"]
    assert 0.4 * 32 < summary["bits_per_value"] < 0.6 * 32
    differences = [abs(a - b) for a, b in zip(likelihoods(result), likelihoods(plain), strict=True)]
    assert sum(differences) / len(differences) > 0.05


@pytest.mark.parametrize("spec", [PRESS, "snapkv:0.5 + quest:budget=64,page_size=16"])
def test_single_prompts_equal_a_batch_of_them(
    folder: Path, pressed: tuple[KVPressLM, dict[str, Any]], spec: str
) -> None:
    together = pressed[1] if spec == PRESS else evaluate(pressed_lm(spec, batch_size=4), folder)
    alone = evaluate(pressed_lm(spec, batch_size=1), folder)
    assert texts(alone) == texts(together)
    assert likelihoods(alone) == pytest.approx(likelihoods(together), abs=1e-3, rel=1e-4)


def test_generated_answers_score_as_greedy(folder: Path, pressed: tuple[KVPressLM, dict[str, Any]]) -> None:
    """Generation and scoring read the same cache, from the first token of an answer on."""
    lm, result = pressed
    prompts = [json.loads(line)["prompt"] for line in (folder / "rows.jsonl").open()]
    answers = [(prompt, text) for prompt, text in zip(prompts, texts(result), strict=True) if text]
    assert all(greedy for _, greedy in lm.loglikelihood(requests("loglikelihood", *answers), disable_tqdm=True))


@pytest.mark.parametrize("batch_size", [3, "auto"])
def test_continuations_of_any_length_and_contexts_that_are_cut(batch_size: int | str) -> None:
    context = " The old river runs near the green hill. The code for tiger is 4837. A king waits here."
    arguments = [
        (context, " The code for tiger is"),
        (context, " A"),
        (context * 4, " The king and the river."),
        (" A king", " waits"),
        (context * 2, " The code for tiger is 4837. A king waits here."),
    ]
    ours, theirs = (
        lm.loglikelihood(requests("loglikelihood", *arguments), disable_tqdm=True)
        for lm in (
            pressed_lm("none", max_length=48, batch_size=batch_size, max_batch_size=2),
            HFLM(kvpress.reference_path(), max_length=48, batch_size=3, **SETTINGS),
        )
    )
    assert [a for a, _ in ours] == pytest.approx([b for b, _ in theirs], abs=1e-3, rel=1e-4)
    assert [a for _, a in ours] == [b for _, b in theirs]


def test_beams_take_their_own_copies_of_the_compressed_prompt() -> None:
    prompt = " The code for tiger is 4837. A king waits here.\nWhat is the code for tiger?\nThe code for tiger is"
    options = {"until": ["."], "max_gen_toks": 6, "num_beams": 3}
    lm, plain = pressed_lm("random:0.1"), pressed_lm("none")
    ours, theirs = (
        m.generate_until(requests("generate_until", (prompt, options)), disable_tqdm=True) for m in (lm, plain)
    )
    assert plain.held.prompts == 1
    assert theirs == [" 4837"]
    assert len(ours) == 1


def test_a_prompt_of_one_token_beside_longer_ones() -> None:
    options = {"until": ["."], "max_gen_toks": 4}
    arguments = [("", options), (" The code for tiger is 4837. A king waits here. The code for tiger is", options)]
    ours, theirs = (
        lm.generate_until(requests("generate_until", *arguments), disable_tqdm=True)
        for lm in (
            pressed_lm("none", batch_size=2),
            HFLM(kvpress.reference_path(), batch_size=2, **SETTINGS),
        )
    )
    assert ours == theirs


def test_tasks_that_never_read_the_cache_warn_and_score_like_hflm() -> None:
    lm, plain = pressed_lm(PRESS), HFLM(kvpress.reference_path(), **SETTINGS)
    text = " The code for tiger is 4837. A king waits here."
    rolling, empty = requests("loglikelihood_rolling", (text,)), requests("loglikelihood", ("", text))
    with pytest.warns(UserWarning, match=r"loglikelihood_rolling \(task demo\).*kvpress fidelity"):
        assert lm.loglikelihood_rolling(rolling, True) == pytest.approx(plain.loglikelihood_rolling(rolling, True))
    with pytest.warns(UserWarning, match="without a context"):
        assert lm.loglikelihood(empty, True)[0] == pytest.approx(plain.loglikelihood(empty, True)[0])
    assert lm.held.summary()["bits_per_value"] is None


@pytest.mark.filterwarnings("error::UserWarning")
def test_without_a_press_nothing_warns() -> None:
    lm = KVPressLM("reference", **SETTINGS)
    lm.loglikelihood_rolling(requests("loglikelihood_rolling", (" A king waits here.",)), True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"press": "snapkw:0.5"}, "snapkv"),
        ({"press": "snapkv:2"}, "must be in"),
        ({"press": 0.5}, "a press is a press object or a spec"),
        ({"pres": "snapkv:0.5"}, "unknown model argument 'pres': did you mean press"),
        ({"mixed_precision_dtype": "bfloat16"}, "load the model with dtype"),
        ({"press": "snapkv:0.5", "window_size": 32}, "'window_size'.*model_args as JSON"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVPressLM(**arguments)


def test_a_press_may_come_as_plain_data() -> None:
    lm = KVPressLM(press={"name": "snapkv", "compression_ratio": 0.5, "window_size": 32}, **SETTINGS)
    assert kvpress.to_spec(lm.press) == "snapkv:compression_ratio=0.5,window_size=32"


def test_by_name_from_the_api_of_lm_eval(folder: Path) -> None:
    manager = TaskManager(include_path=folder)
    options = {"tasks": ["codes_generated"], "task_manager": manager, "limit": 2, "device": "cpu", "bootstrap_iters": 0}
    result = simple_evaluate("kvpress", "pretrained=reference,press=snapkv:0.5", **options)
    assert result["config"]["press"] == "snapkv:compression_ratio=0.5"
    assert result["config"]["held"]["prompts"] == 2


def test_lm_evals_own_command_line(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = json.dumps({"pretrained": "reference", "press": "snapkv:0.5,window_size=32"})
    options = ["--tasks", "codes_generated", "--include_path", str(folder), "--limit", "2", "--device", "cpu"]
    arguments = ["run", "--model", "kvpress", "--model_args", model, *options, "--output_path", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["lm-eval", *arguments])
    main()
    (written,) = tmp_path.rglob("results*.json")
    config = json.loads(written.read_text())["config"]
    assert config["press"] == "snapkv:compression_ratio=0.5,window_size=32"
    assert config["held"]["bits_per_value"] < 16


def test_the_entry_point_names_the_class() -> None:
    """Releases of lm-eval after 0.4.13 find the model by this entry point."""
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    match = re.search(r'entry-points."lm_eval.models"\]\nkvpress = "(.+)"', project)
    assert match
    assert EntryPoint("kvpress", match.group(1), "lm_eval.models").load() is KVPressLM


def test_the_command_compares_presses(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "scores.json"
    options = ["--include", str(folder), "--limit", "3", "--batch-size", "3", "--device", "cpu", "--dtype", "float32"]
    presses = ["--press", "none", "--press", PRESS]
    code, output = invoke("lm-eval", "--tasks", "codes_*", *presses, *options, "--out", str(out))
    assert code == 0, output
    assert "exact_match (strip)" in output
    record = json.loads(out.read_text())
    assert [measured["press"] for measured in record["presses"]] == ["none", PRESS]
    none, pressed = (measured["held"] for measured in record["presses"])
    assert pressed["bytes_per_prompt"] < 0.7 * none["bytes_per_prompt"]
    values = {(task, metric): value for task, metric, value, *_ in lm_scores(record["presses"][0])}
    assert values == {("codes_generated", "exact_match (strip)"): 1.0, ("codes_chosen", "acc"): 1.0}
    assert [samples for *_, samples in lm_scores(record["presses"][0])] == [3, 3]
    assert {"kvpress", "torch", "transformers", "lm_eval", "weights"} <= record.keys()
    assert record["presses"][0]["config"]["limit"] == 3


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--tasks", "codes_chosn"], 2, "lm-eval has no task 'codes_chosn': did you mean codes_chosen"),
        (["--tasks", ","], 2, "name at least one task"),
        (["--tasks", "xyzzy"], 2, "`lm-eval ls tasks` lists all"),
        (["--tasks", "codes_chosen", "--press", "snapkw"], 2, "snapkv"),
        (["--tasks", "codes_chosen", "--metadata", "[1]"], 2, "metadata must be a JSON object"),
        (["--tasks", "codes_chosen", "--metadata", "{"], 2, "metadata must be JSON"),
        (["--tasks", "lost"], 3, "cannot load task 'lost'"),
    ],
)
def test_mistakes_are_reported_before_the_model_loads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, message: str
) -> None:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(tasks, "load_engine", refuse)
    for path in folder.glob("*.yaml"):
        (tmp_path / path.name).write_text(path.read_text())
    lost = yaml.safe_load((folder / "codes_chosen.yaml").read_text())
    lost.update(task="lost", dataset_kwargs={"data_files": {"test": str(tmp_path / "nothing.jsonl")}})
    (tmp_path / "lost.yaml").write_text(yaml.safe_dump(lost))
    got, output = invoke("lm-eval", "--include", str(tmp_path), *arguments)
    assert got == code, output
    assert message in output


def test_eval_runs_tasks_of_lm_eval_too(folder: Path, tmp_path: Path) -> None:
    options = ["--press", "none", "--press", PRESS, "--lm-eval", "codes_generated", "--lm-eval-include", str(folder)]
    code, output = invoke("eval", *options, "--samples", "2", "--out", str(tmp_path / "run"))
    assert code == 0, output
    (path,) = (tmp_path / "run").glob("lm-eval-*.json")
    records = json.loads(path.read_text())["presses"]
    assert {record["press"] for record in records} == {"none", PRESS}
    assert not (tmp_path / "run" / "cells").exists()
    further = ["--press", "none", *options[4:], "--samples", "2", "--out", str(tmp_path / "run")]
    for files in (2, 2):
        code, output = invoke("eval", *further)
        assert code == 0, output
        assert len(list((tmp_path / "run").glob("lm-eval-*.json"))) == files
    assert json.loads(path.read_text())["presses"] == records


def test_settings_that_lm_eval_does_not_read_are_refused(tmp_path: Path) -> None:
    code, output = invoke(
        "eval",
        "--press",
        "none",
        "--lm-eval",
        "codes",
        "--seed",
        "3",
        "--question-aware",
        "--out",
        str(tmp_path / "run"),
    )
    assert code == 2
    assert "tasks of lm-eval do not read seed, question_aware: leave that out" in output
    assert not (tmp_path / "run").exists()


def test_a_folder_of_tasks_that_does_not_exist(tmp_path: Path) -> None:
    code, output = invoke("lm-eval", "--tasks", "any", "--include", str(tmp_path / "none"))
    assert code == 2
    assert "no folder" in output


def test_without_lm_eval_the_message_has_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(require, "_PARTS", ("a_package_that_is_not_there",))
    code, output = invoke("lm-eval", "--tasks", "gsm8k")
    assert code == 2
    assert "pip install 'kvpress-toolkit[lm-eval]'" in output
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "pip install 'kvpress-toolkit[lm-eval]'" in capsys.readouterr().err
