# SPDX-License-Identifier: Apache-2.0
"""`kvpress tune` from end to end on tiny contexts: its output, and refused settings."""

from __future__ import annotations

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from kvpress_eval import tune as tune_from_python
from kvpress_eval.commands.tune import show
from kvpress_eval.common.errors import BusyError, ConfigError, DataError, OutputError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.results.cells import CellResult
from kvpress_eval.results.store import CellStore
from kvpress_eval.run.prompts import Prompt
from kvpress_eval.tasks.sample import Query
from kvpress_eval.tuning import find, result, scoring
from kvpress_eval.tuning import wishes as wishes_module
from kvpress_eval.tuning.find import tune
from kvpress_eval.tuning.items import Item, SplitPart
from kvpress_eval.tuning.result import PRESS, Tuned, losses_by_context, print_frontier
from kvpress_eval.tuning.search import Standing
from kvpress_eval.tuning.space import Space
from kvpress_eval.tuning.wishes import Wishes
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvpress
from tests.eval.commands import invoke
from tests.eval.engines import bundled_model
from tests.eval.jsonl import write_lines
from tests.models import COMMON

WISHES = Wishes(smaller=6.0, held_out=2, candidates=3)
FIELDS: dict[str, Any] = {
    "tasks": ("niah_single", "cwe"), "lengths": (128,), "samples": 4, "max_new_tokens": 4, "threads": 1,
}  # fmt: skip
OWN = {name: value for name, value in FIELDS.items() if name != "tasks"}
"""Fields for samples of the user."""


def run_tune(out: Path, wishes: Wishes = WISHES, **fields: Any) -> tuple[Tuned, str]:
    console = Console(file=io.StringIO(), width=160)
    tuned = tune(RunConfig(**{**FIELDS, "out": out, **fields}), wishes, console)
    return tuned, console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def finished_search(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tuned, str, Path]:
    """Finish a search once, for tests that only read it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(find, "load_engine", lambda config, settings=None: bundled_model())
        out = tmp_path_factory.mktemp("best")
        return *run_tune(out), out


def test_the_pick_meets_the_size(finished_search: tuple[Tuned, str, Path]) -> None:
    tuned, _, _ = finished_search
    assert tuned.pick.factor >= 5.9
    assert tuned.frontier[0].press == "none"
    assert tuned.frontier[0].factor == 1
    ids = torch.randint(3, 900, (1, 128), generator=torch.Generator().manual_seed(0))
    (cache,) = kvpress.prefill(bundled_model().model, [kvpress.get_press(tuned.press)], ids).caches
    report = kvpress.memory_report(cache)
    assert report.uncompressed_bytes / report.total_bytes >= 5.9


def test_the_file_is_the_press_with_the_conditions_of_its_tuning(finished_search: tuple[Tuned, str, Path]) -> None:
    tuned, _, out = finished_search
    assert kvpress.get_press(str(out / PRESS)) == kvpress.get_press(tuned.press)
    assert RunConfig(presses=(f"@{out / PRESS}",)).presses == (kvpress.to_spec(kvpress.get_press(tuned.press)),)
    record = yaml.safe_load((out / PRESS).read_text())
    on = record["tuned"]
    assert on["model"] == "reference"
    assert on["weights"] == bundled_model().fingerprint
    assert (on["tasks"], on["lengths"], on["seed"], on["limit"]) == (["cwe", "niah_single"], [128], 0, "6x smaller")
    planned, held_out = record["planned"], record["held_out"]
    assert held_out["peak_bytes"] == round(tuned.pick.peak_bytes or 0) > held_out["bytes"]
    assert planned["bytes"] <= planned["allowed_bytes"]
    assert planned["limited"] == "held"
    written = json.loads((out / result.RESULT).read_text())
    assert [row["peak_bytes"] for row in written["frontier"]] == [row.peak_bytes for row in tuned.frontier]
    assert all(row["peak_bytes"] >= row["bytes"] for row in (*written["frontier"], *written["searched"]))
    assert written["planned"] == planned
    assert record["held_out"]["mean"][0] == pytest.approx(tuned.pick.accuracy.mean, abs=1e-4)


def test_the_printed_lines(finished_search: tuple[Tuned, str, Path]) -> None:
    tuned, printed, _ = finished_search
    assert "cache of 128 tokens with no press" in printed
    assert re.search(
        r"the cache may hold \S+ KiB of a context of (12\d to )?12\d tokens(, on average)?: 6x smaller", printed
    )
    assert "on 4 contexts of each of 2 tasks" in printed
    assert "halved again and again; then the best are measured" in printed
    assert "are known" not in printed
    assert " left" in printed
    assert printed.index("the best at another size, 4 contexts of each task: ") < printed.index("on held-out samples")
    assert tuned.press in tuned.sentence
    assert "held-out samples" in tuned.sentence
    assert tuned.pick.worst is not None
    assert tuned.pick.worst[0] in tuned.sentence


def test_a_search_without_time_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "load_engine", lambda config, settings=None: bundled_model())
    with pytest.raises(ConfigError, match="1e-09 minutes of search were too few to compare any press"):
        run_tune(tmp_path / "best", replace(WISHES, minutes=1e-9))


def test_no_sample_is_searched_on_and_held_out(finished_search: tuple[Tuned, str, Path]) -> None:
    _, _, out = finished_search
    searched = {line.split(" | ")[1].split('"')[0] for line in (out / "search.jsonl").read_text().splitlines()}
    rows = [path.read_text() for path in (out / "cells").glob("*/rows.jsonl")]
    assert rows
    assert not any(f'"{name}"' in text for name in searched for text in rows)


def test_a_second_start_examines_nothing_again(
    finished_search: tuple[Tuned, str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned, _, out = finished_search
    shutil.copytree(out, tmp_path / "best")
    monkeypatch.setattr(scoring, "read_contexts", lambda *_: pytest.fail("a context was read again"))
    resumed, printed = run_tune(tmp_path / "best")
    assert f"{len((out / 'search.jsonl').read_text().splitlines())} scores of an earlier run are reused" in printed
    assert (resumed.press, resumed.frontier, resumed.sentence) == (tuned.press, tuned.frontier, tuned.sentence)


@pytest.mark.parametrize(
    ("fields", "difference"),
    [
        ({"seed": 1}, "seed 0, not 1"),
        ({"tasks": ("cwe",)}, "tasks .*'niah_single'.*, not .*'cwe'"),
        ({"samples": 5}, "samples"),
    ],
)
def test_a_folder_of_another_search_is_refused(
    finished_search: tuple[Tuned, str, Path], tmp_path: Path, fields: dict[str, Any], difference: str
) -> None:
    shutil.copytree(finished_search[2], tmp_path / "best")
    with pytest.raises(OutputError, match=f"belongs to another search .*{difference}.*: use a new --out"):
        run_tune(tmp_path / "best", **fields)


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with CellStore(tmp_path).claim(), pytest.raises(BusyError, match="another process tunes"):
        run_tune(tmp_path)


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"smaller": None}, "give either memory, such as 4GB, or smaller"),
        ({"memory": "4GB"}, "give either memory, such as 4GB, or smaller"),
        ({"smaller": 0.5}, "smaller must be at least 1, got 0.5"),
        ({"smaller": float("nan")}, "smaller must be at least 1, got nan"),
        ({"context": 4096}, "context and batch apply to memory only"),
        ({"batch": 2}, "context and batch apply to memory only"),
        ({"max_drop": -1.0}, "max_drop must be at least 0, got -1"),
        ({"confidence": 0.2}, "confidence must be at least 0.5 and below 1, such as 0.95, got 0.2"),
        ({"confidence": 1.0}, "confidence must be at least 0.5 and below 1"),
        ({"confidence": 0.95, "max_drop": 0.0}, "a guarantee needs a max_drop above 0 and below 100 points, got 0"),
        (
            {"status": "recommended, good"},
            "status must be recommended, reproduction, experimental or several of them, got 'good'",
        ),
        ({"candidates": 0}, "candidates must be at least 1"),
        ({"smaller": 1e6}, "more than any press reaches: at most"),
        ({"smaller": None, "memory": "1MB"}, "does not hold the weights of the model, 5.0 MiB"),
        ({"smaller": None, "memory": "5.0MiB", "context": 4096}, "is not enough: at least"),
        ({"smaller": None, "memory": "1GB"}, "no press is needed: with memory 1GB the cache of 128 tokens, at most "),
        (
            {"smaller": None, "memory": "1GB", "context": 10**7},
            "context 10000000 is over the 4096 positions .*: give a shorter one",
        ),
        ({"data": Path("none.jsonl")}, "give data or tasks, not both"),
    ],
)
def test_wishes_that_cannot_be_met(tmp_path: Path, wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_tune(tmp_path / "best", replace(WISHES, **wishes))
    assert not (tmp_path / "best").exists()


def test_options_that_a_search_cannot_read_are_refused(tmp_path: Path) -> None:
    """Samples at two depths have the same names, so that the scores of one depth would count for the other."""
    with pytest.raises(ConfigError, match="a search takes one depth"):
        run_tune(tmp_path / "best", tasks=("niah_single",), depths=(0.0, 1.0))
    path = write_lines(tmp_path / "texts.jsonl", {"text": "One text."})
    config = RunConfig(question_aware=True, max_context_length=64, out=tmp_path / "best")
    with pytest.raises(ConfigError, match="to which question_aware, max_context_length cannot apply: leave that out"):
        find.tune(config, replace(WISHES, data=path), Console())
    assert not (tmp_path / "best").exists()


def test_memory_is_of_weights_and_cache(tmp_path: Path) -> None:
    tuned, printed = run_tune(
        tmp_path, replace(WISHES, smaller=None, memory="5.06MiB", candidates=4, max_drop=0.0), tasks=("niah_single",)
    )
    assert "budget=" in tuned.press
    assert tuned.planned is not None
    assert tuned.planned.limited == "peak"
    assert tuned.planned.bytes <= tuned.planned.peak_bytes <= tuned.planned.allowed_bytes
    assert tuned.sentence.endswith(f"{tuned.planned.line}.")
    assert "the cache may take" in printed
    assert tuned.kept is (tuned.pick.worst is not None and tuned.pick.worst[1].mean >= 0)


def test_the_full_cache_may_be_the_smallest_within_the_allowed_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "load_engine", lambda config, settings=None: bundled_model())
    monkeypatch.setattr(
        find, "pick", lambda best, smaller, max_drop: next(measured for measured in best if measured.press == "none")
    )
    monkeypatch.setattr(find, "FINALISTS", 99)
    monkeypatch.setattr(find, "make_space", lambda statuses: Space(("knorm",), (), (), ()))  # `none` is a candidate
    tuned, printed = run_tune(
        tmp_path, replace(WISHES, smaller=None, memory="1GB", candidates=8, max_drop=0.0), tasks=("niah_single",)
    )
    assert [measured.press for measured in tuned.frontier].count("none") == 1
    assert tuned.sentence.startswith("Use no press: the full cache of a context")
    assert "best of the search: " in printed
    assert kvpress.get_press(str(tuned.path)) == kvpress.get_press("none")


def test_a_model_that_retrieves_nothing_is_not_ranked(
    tmp_path: Path, reference_tokenizer: PreTrainedTokenizerBase, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    config = CONFIG_MAPPING["llama"](**{**COMMON, "vocab_size": 985})
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ConfigError, match="retrieves nothing: with the full cache it scores"):
        tune_from_python(model, tokenizer=reference_tokenizer, smaller=4, language="reference", out=tmp_path, **FIELDS)
    assert "whether the model retrieves is checked on up to 4 contexts of each task" in capsys.readouterr().out


def test_texts_without_answers_are_judged_by_likelihood(tmp_path: Path) -> None:
    keys = ("tiger", "lantern", "hammer", "necklace", "piano", "drum", "coat", "river")
    rows = [{"text": f" The code for {key} is {1000 + 37 * at}. The {key} waits." * 18} for at, key in enumerate(keys)]
    path = write_lines(tmp_path / "texts.jsonl", *rows)
    config = RunConfig(**{**OWN, "out": tmp_path / "best"})
    console = Console(file=io.StringIO(), width=200)
    tuned = tune(config, replace(WISHES, data=path, candidates=2), console)
    assert "likelihood of a token" in tuned.sentence
    assert "has no answers: presses are judged by the likelihood" in console.file.getvalue()  # type: ignore[attr-defined]
    assert set(tuned.frontier[0].tasks) == {"text"}
    assert 0 < tuned.pick.accuracy.mean < 1
    assert tuned.pick.factor >= 5.9


def test_samples_of_the_user_are_tasks(tmp_path: Path) -> None:
    keys = ("tiger", "lantern", "hammer", "necklace", "piano", "drum", "coat", "river")
    rows = [
        {
            "context": f" The code for {key} is 48{number}. The old river runs slowly." + " A tiger waits calmly." * 6,
            "question": f"\nWhat is the code for {key}?",
            "answer_prefix": f"The code for {key} is",
            "answer": f"48{number}",
        }
        for number, key in enumerate(keys, start=10)
    ]
    path = write_lines(tmp_path / "mine.jsonl", *rows)
    config = RunConfig(**{**OWN, "out": tmp_path / "best"})
    tuned = tune(config, replace(WISHES, smaller=2.0, data=path, candidates=1), Console(file=io.StringIO()))
    assert set(tuned.frontier[0].tasks) == {"data"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"context": "a", "question": "b", "answer": "c"}, {"context": "a"}], "mine.jsonl:2: a row without `answer`"),
        ([{"context": "a", "question": "b", "answer": "c"}], "1 contexts; at least 4 are needed"),
        ([{"text": "short"}], "0 texts of at least 128 tokens"),
        ([{"context": "long"}], "expected a JSON object with a `text`"),
        ([3], "mine.jsonl:1: not a task row"),
    ],
)
def test_data_that_cannot_be_tuned_on(tmp_path: Path, rows: list[Any], message: str) -> None:
    path = write_lines(tmp_path / "mine.jsonl", *rows)
    config = RunConfig(**{**OWN, "out": tmp_path / "best"})
    with pytest.raises((ConfigError, DataError), match=message):
        tune(config, replace(WISHES, data=path), Console(file=io.StringIO()))


@pytest.mark.parametrize("max_drop", [None, 60.0])
def test_a_guarantee(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_drop: float | None) -> None:
    monkeypatch.setattr(find, "load_engine", lambda config, settings=None: bundled_model())
    monkeypatch.setattr(wishes_module, "GUARANTEED", 60.0)
    wishes = replace(WISHES, smaller=2.0, held_out=3, confidence=0.6, max_drop=max_drop)
    tuned, printed = run_tune(tmp_path / "best", wishes, tasks=("niah_single",))
    found = tuned.guarantee
    assert found is not None
    assert (found.press, found.contexts, tuned.kept) == (tuned.press, 3, found.holds)
    assert f"{found.press}: {found.phrase()}" in printed
    assert tuned.sentence.endswith(f"points: {found.phrase()}.") or "that may be lost" in tuned.sentence
    record = yaml.safe_load((tmp_path / "best" / PRESS).read_text())
    assert record["guarantee"]["holds"] == found.holds
    assert (record["guarantee"]["points"], record["guarantee"]["confidence"]) == (60, 0.6)
    assert kvpress.get_press(str(tmp_path / "best" / PRESS)) == kvpress.get_press(tuned.press)


def test_a_guarantee_that_no_result_could_give_is_refused_before_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "load_engine", lambda config, settings=None: bundled_model())
    monkeypatch.setattr(scoring, "read_contexts", lambda *_: pytest.fail("a context was read"))
    with pytest.raises(
        ConfigError, match=r"needs 103 held-out contexts of each task .*; niah_single has 2: give held_out=103"
    ):
        run_tune(tmp_path / "best", replace(WISHES, confidence=0.95), tasks=("niah_single",))


@pytest.mark.parametrize(("lost", "expected"), [(0, ("a", True)), (10, ("none", None))])
def test_a_full_cache_among_the_best_is_the_pick_only_if_no_press_is_guaranteed(
    monkeypatch: pytest.MonkeyPatch, lost: int, expected: tuple[str, bool | None]
) -> None:
    losses = {"none": {"t": [0.0] * 120}, "a": {"t": [1.0] * lost + [0.0] * (120 - lost)}}
    monkeypatch.setattr(result, "losses_by_context", lambda cells, held_out: losses)
    best = [Standing(name, 8, {"t": 0.0}, size) for name, size in (("none", 100.0), ("a", 10.0))]
    said: list[str] = []
    tuning: Any = SimpleNamespace(
        wishes=Wishes(memory="1GB", max_drop=5.0, confidence=0.95),
        split=SimpleNamespace(held_out=[]),
        _print=said.append,
        _fitting=list,
    )
    press, guarantee = find._Tuning._guaranteed(tuning, "a", best, [], [])
    assert (press, guarantee and guarantee.holds) == expected
    assert len(said) == 1


def test_questions_about_one_context_are_one_loss() -> None:
    def cell(press: str, *scores: float) -> CellResult:
        rows = [{"sample": f"s{i}", "score": score} for i, score in enumerate(scores)]
        return CellResult({"press": press, "task": "vt", "length": 128}, len(rows), rows, None, None)

    prompt, query = Prompt([3], [3], ""), Query("", "", (), "any")
    items = [Item(f"s{i}", "vt", 128, prompt, query, 4) for i in range(4)]
    parts = [SplitPart("vt", 128, [items[:3], items[3:]])]
    cells = [cell("none", 1, 1, 0, 1), cell("a", 1, 0, 0, 1), cell("b", 0, 0, 1, 0)]
    losses = losses_by_context(cells, parts)
    assert losses["a"] == {"vt": [pytest.approx(1 / 3), 0]}
    assert losses["b"] == {"vt": [pytest.approx(1 / 3), 1]}


def test_the_command(finished_search: tuple[Tuned, str, Path], tmp_path: Path) -> None:
    wishes = ("--held-out", 2, "--candidates", 3, "--lengths", 128, "--samples", 6, "--threads", 1)
    code, printed = invoke("tune", "--smaller", 6, *wishes, "--out", finished_search[2])
    assert code == 4, printed
    assert "belongs to another search" in printed
    code, printed = invoke("tune", "--smaller", 6, "--max-drop", -2, "--out", tmp_path / "best")
    assert code == 2, printed
    assert "max_drop must be at least 0, got -2" in printed
    assert "tuning on generated tasks" in printed
    code, printed = invoke("tune", "--smaler", 6)
    assert code == 2
    assert "No such option" in printed


def test_the_table_and_the_files(finished_search: tuple[Tuned, str, Path], tmp_path: Path) -> None:
    tuned, _, out = finished_search
    shutil.copytree(out, tmp_path / "best")
    console = Console(file=io.StringIO(), width=200)
    show(replace(tuned, path=tmp_path / "best" / PRESS), console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    (line,) = (line for line in printed.splitlines() if line.startswith(">"))
    assert tuned.press in line
    narrow = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    print_frontier(tuned.frontier, tuned.press, narrow)
    lines = narrow.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    (folded,) = (line for line in lines if line.startswith(">"))
    assert f"{tuned.pick.factor:.1f}x" in folded
    assert tuned.press[:8] in folded
    assert f"{tuned.pick.factor:.1f}x" in line
    assert tuned.sentence in printed
    assert f"wrote {tmp_path / 'best' / PRESS}" in printed
    assert f"open {tmp_path / 'best' / 'report.html'}" in printed
    (beside,) = (line for line in printed.splitlines() if line.startswith("beside it: "))
    assert "frontier.png" in beside
    for name in (PRESS, "report.html", "frontier.png"):
        assert (tmp_path / "best" / name).stat().st_size
