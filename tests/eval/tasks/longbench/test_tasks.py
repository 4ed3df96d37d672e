# SPDX-License-Identifier: Apache-2.0
"""Prompts, names and runs of the LongBench tasks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval import evaluate
from kvpress_eval.common.errors import ConfigError, DataError
from kvpress_eval.config.load import load_config
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.report.write import write_outputs
from kvpress_eval.run import job
from kvpress_eval.run.prompts import make_prompt
from kvpress_eval.run.runner import run
from kvpress_eval.tasks.catalogue import expand_tasks
from kvpress_eval.tasks.kinds import longbench
from kvpress_eval.tasks.kinds.longbench import cut_middle
from kvpress_eval.tasks.sample import score
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from tests.eval.content import content
from tests.eval.jsonl import write_lines
from tests.eval.tasks.longbench.rows import cell_ids, expand, only, question


def test_a_context_is_split_from_its_question(data: Path, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    (sample,) = only("longbench:hotpotqa", data, byte_tokenizer)
    assert sample.context.startswith("Find the answer to a question in the passages.")
    assert sample.context.endswith("\nPassages:\n" + question(0)["context"])
    assert sample.query.question.endswith("\n\nQuestion: Why?\nAnswer:")
    prompt = make_prompt(byte_tokenizer, sample, question_aware=False)
    assert byte_tokenizer.decode(prompt.first + prompt.second) == sample.context + sample.query.question


def test_a_choice_is_asked_with_its_letters(data: Path, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    sample = only("longbench-v2:hard", data, byte_tokenizer)[0]
    assert sample.context.endswith("\nText:\ndef f(): ...")
    assert sample.query.question.endswith("\n\nQuestion: Which?\n(A) a\n(B) b\n(C) c\n(D) d\nAnswer:")
    assert '"The correct answer is (letter)"' in sample.query.question
    assert score(sample.query, "The correct answer is (C)") == 1


def test_few_shot_prompts_stay_out_of_the_chat_template(data: Path, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = "<user>{{ messages[0].content }}</user>"
    try:
        for name, chat in (("trec", False), ("hotpotqa", True)):
            sample = only(f"longbench:{name}", data, byte_tokenizer)[0]
            prompt = make_prompt(byte_tokenizer, sample, question_aware=False)
            text = byte_tokenizer.decode(prompt.first + prompt.second)
            plain = sample.context + sample.query.question
            assert text == (f"<user>{plain}</user>" if chat else plain)
    finally:
        byte_tokenizer.chat_template = None


def test_question_aware_prompts_answer_from_the_last_token(data: Path, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    sample = only("longbench:trec", data, byte_tokenizer)[0]
    prompt = make_prompt(byte_tokenizer, sample, question_aware=True)
    assert byte_tokenizer.decode(prompt.first + prompt.second) == sample.context + sample.query.question
    assert byte_tokenizer.decode(prompt.second) == ":"


def test_long_prompts_lose_their_middle(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    # One token per character: the first and the last ten stay.
    assert cut_middle("abcdefghijklmnopqrstuvwxyz", "012345", 20, byte_tokenizer) == "abcdefghijwxyz"
    assert cut_middle("abcdefghijklmn", "012345", 20, byte_tokenizer) == "abcdefghijklmn"
    assert cut_middle("abcdefghijklmno", "012345", 20, byte_tokenizer) == "abcdefghijlmno"
    with pytest.raises(ValueError, match="length 20 is too short"):
        cut_middle("abcdefghijklmnopqrstuvwxyz", "01234567890", 20, byte_tokenizer)


def test_samples_never_exceed_the_length(data: Path, reference_tokenizer: PreTrainedTokenizerBase) -> None:
    full_sample = only("longbench:trec", data, reference_tokenizer)[0]
    longest = len(reference_tokenizer(full_sample.context + full_sample.query.question)["input_ids"]) - 20
    short = only("longbench:trec", data, reference_tokenizer, longest)[0]
    tokens = len(reference_tokenizer(short.context + short.query.question)["input_ids"])
    assert longest - 5 <= tokens <= longest
    assert short.query.question == full_sample.query.question


def test_metrics_know_their_subset(data: Path, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    trec = only("longbench:trec", data, byte_tokenizer)[0]
    assert score(trec.query, "Number\nQuestion: Human") == 1
    assert score(trec.query, "Number Human") == 0.5
    (hotpotqa,) = only("longbench:hotpotqa", data, byte_tokenizer)
    assert score(hotpotqa.query, "Yes.\nSo") == pytest.approx(2 / 3)
    assert [task.max_new_tokens for task in expand("longbench:trec", data)] == [64]


def test_names_stand_for_rows(data: Path) -> None:
    def ids(name: str) -> list[str]:
        return [sample.rpartition("-")[2] for task in expand(name, data) for sample in task.ids]

    assert ids("longbench:trec_e") == ["id0", "id1", "id2", "id3"]
    assert ids("longbench:trec_e:0-4k") == ["id0"]
    assert ids("longbench:trec_e:4-8k") == ["id1"]
    assert ids("longbench:trec_e:8k+") == ["id2", "id3"]
    assert ids("longbench-v2") == ["id0", "id1"]
    assert ids("longbench-v2:easy") == ids("longbench-v2:multi-document-qa") == ["id1"]
    with pytest.raises(DataError, match="no rows for longbench-v2:long "):
        expand("longbench-v2:long", data)
    with pytest.raises(DataError, match=r"narrativeqa\.jsonl"):
        expand("longbench:all", data)
    assert [task.length for task in expand("longbench:trec", data, 64, 128)] == [64, 128]


def test_a_subset_named_twice_runs_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two = [*longbench.NAMES["longbench:trec"], *longbench.NAMES["longbench:hotpotqa"]]
    monkeypatch.setitem(longbench.NAMES, "longbench:all", two)
    config = RunConfig(tasks=("longbench:trec", "longbench:all"), lengths=(512,), data_dir=data)
    assert [source.task for source in expand_tasks(config)] == ["longbench:trec", "longbench:hotpotqa"]


def test_without_jieba_chinese_subsets_are_refused(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longbench.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="longbench:dureader is scored by words that jieba separates"):
        expand("longbench:dureader", data)
    assert expand("longbench:trec", data)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("longbench:trek", "unknown subset of longbench 'trek': did you mean trec"),
        ("longbench:musique_e", "unknown subset of longbench"),
        ("longbench", "unknown subset of longbench ''"),
        ("longbench-v2:medum", "did you mean medium"),
    ],
)
def test_a_misspelt_name_is_refused(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        load_config(None, {"tasks": (name,)})


def test_lengths_are_required(data: Path) -> None:
    with pytest.raises(ConfigError, match="longbench:trec needs lengths"):
        expand_tasks(RunConfig(tasks=("longbench:trec",), data_dir=data))


def test_yaml_names_the_folder(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"tasks: [niah_single, 'longbench:trec']\nlengths: [512]\ndata_dir: {data}\n")
    assert [source.task for source in expand_tasks(load_config(path, {}))] == ["niah_single", "longbench:trec"]


def test_a_cell_is_named_by_the_data(data: Path, tmp_path: Path) -> None:
    config = RunConfig(tasks=("longbench:trec",), lengths=(512,), data_dir=data)
    base = cell_ids(config)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "trec.jsonl").write_bytes((data / "trec.jsonl").read_bytes())
    assert cell_ids(config.model_copy(update={"data_dir": elsewhere})) == base
    assert cell_ids(config.model_copy(update={"seed": 1, "language": "english"})) == base
    assert cell_ids(config.model_copy(update={"max_new_tokens": 64})) == base
    for change in ({"lengths": (513,)}, {"max_new_tokens": 8}):
        assert cell_ids(config.model_copy(update=change)) != base
    write_lines(data / "trec.jsonl", question(0), question(1, answers=["Human"]))
    assert cell_ids(config) != base


@pytest.fixture
def tiny(data: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    def build(**fields: Any) -> RunConfig:
        defaults = {"tasks": ("longbench:trec",), "lengths": (96,), "data_dir": data, "threads": 1, "samples": 2}
        defaults |= {"presses": ("none", "random:0.5"), "max_new_tokens": 8, "out": tmp_path / "run"}
        return RunConfig(**{**defaults, **fields})

    return build


def test_a_run_has_a_row_per_sample(data: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    rows = evaluate(
        "reference",
        ["none", "random:0.5"],
        ["longbench:trec", "niah_single"],
        lengths=[96],
        samples=2,
        data_dir=data,
        threads=1,
        out=tmp_path / "run",
    )
    assert isinstance(rows, pandas.DataFrame)
    ours = rows[rows["task"] == "longbench:trec"]
    assert ours["sample"].tolist() == [f"longbench:trec-96-id{number}" for number in (0, 1)] * 2
    assert set(ours["status"]) == {"ok"}
    assert ours["score"].between(0, 1).all()
    assert all(expected == ["Number"] for expected in ours["expected"])
    assert ours["context_tokens"].between(60, 96).all()
    assert (ours["new_tokens"] <= 64).all()
    kept = ours.groupby("press")["kept"].mean()
    assert kept["none"] == 1
    assert kept["random:0.5"] == pytest.approx(0.5, abs=0.02)


def test_a_stopped_run_continues(
    tiny: Callable[..., RunConfig], tmp_path: Path, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny(samples=1), quiet)
    continued = run(tiny(), quiet)
    undisturbed = tiny(out=tmp_path / "whole")
    run(undisturbed, quiet)
    assert continued.exit_code == 0
    assert content(tiny()) == content(undisturbed)
    monkeypatch.setattr(job, "read_contexts", None)
    assert run(tiny(), quiet).exit_code == 0


def test_a_question_aware_run_shows_its_kept_tokens(tiny: Callable[..., RunConfig], quiet: Console) -> None:
    config = tiny(question_aware=True, samples=1, max_new_tokens=4)
    result = run(config, quiet)
    assert result.exit_code == 0
    report, *_ = write_outputs([config.out], config.out / "report.html")
    assert "How far is star 0?" in report.read_text()
