# SPDX-License-Identifier: Apache-2.0
"""`max_context_length`: contexts of a run that lose their middle, and the reports of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.report.nvidia_folders import to_folders
from kvpress_eval.report.table import note, records
from kvpress_eval.report.write import write_outputs
from kvpress_eval.results.leaderboards import make_boards
from kvpress_eval.results.read import read_runs
from kvpress_eval.results.store import store_of
from kvpress_eval.results.summary import summarise
from kvpress_eval.run.prompts import make_prompt
from kvpress_eval.run.runner import run
from kvpress_eval.tasks.sample import Query, Sample
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from tests.eval.jsonl import write_lines

TEXT = " ".join(f"Line {number}." for number in range(60))
TEMPLATE = "<user>{{ messages[0].content }}</user><model>"


def sample(context: str = TEXT, question: str = "Which?") -> Sample:
    return Sample(
        "s", "t", 0, context, Query(question, "", ("1",), "any"), spans=((0, 4), (len(context) - 4, len(context)))
    )


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("longest", [40, 41])
def test_the_start_and_the_end_remain(
    byte_tokenizer: PreTrainedTokenizerBase, template: str | None, longest: int
) -> None:
    byte_tokenizer.chat_template = template
    try:
        full = make_prompt(byte_tokenizer, sample(), question_aware=False)
        cut = make_prompt(byte_tokenizer, sample(), question_aware=False, longest=longest)
    finally:
        byte_tokenizer.chat_template = None
    assert len(cut.first) == longest
    assert cut.first == full.first[: longest - 20] + full.first[-20:]
    assert cut.second == full.second
    assert cut.num_cut == len(full.first) - longest
    assert byte_tokenizer.decode(cut.first).startswith("<user>Line 0" if template else "Line 0")


def test_a_context_that_fits_is_whole(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    full = make_prompt(byte_tokenizer, sample(), question_aware=False)
    assert make_prompt(byte_tokenizer, sample(), question_aware=False, longest=len(full.first)) == full
    assert full.num_cut == 0


def test_the_question_is_never_cut(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    cut = make_prompt(byte_tokenizer, sample(), question_aware=True, longest=40)
    assert byte_tokenizer.decode(cut.first + cut.second).endswith("Which?\n")
    with pytest.raises(
        ValueError, match="max_context_length 40 is too short: half of it must hold the question, 21 tokens"
    ):
        make_prompt(byte_tokenizer, sample(question="x" * 21), question_aware=True, longest=40)


@pytest.fixture
def limited(small: Callable[..., RunConfig], tmp_path: Path) -> RunConfig:
    rows: list[Mapping[str, Any]] = [
        {"context": " The king waits." * 40, "question": "Who waits?", "answer": "The king"},
        {"context": " The king waits.", "question": "Who waits?", "answer": "The king"},
    ]
    path = write_lines(tmp_path / "rows.jsonl", *rows)
    return small(tasks=(f"file:{path}",), language="reference", max_context_length=32)


def test_a_run_reports_the_cut_contexts(limited: RunConfig, quiet: Console) -> None:
    result = run(limited, quiet)
    assert result.exit_code == 0
    for cell in result.cells:
        assert [row["cut_tokens"] > 0 for row in cell.rows] == [True, False]
        assert cell.rows[0]["context_tokens"] == 32
        kept = store_of(limited.out, next(iter(row["cell"] for row in cell.rows))).kept()
        assert kept is not None
        # The tokens that are shown are those that were read.
        assert len(kept["tokens"]) == 32
        assert "".join(kept["tokens"]).startswith(" The king")
        assert kept["tokens"][-1] == "."
    summaries = summarise(result.cells)
    assert [summary.cut for summary in summaries] == [1, 1]
    assert "1 of them with a context that lost its middle" in note(summaries)
    assert [line["cut"] for line in records(summaries)] == [1, 1]
    page = write_outputs([limited.out], limited.out / "report.html")[0]
    assert "1 of them with a context that lost its middle" in page.read_text(encoding="utf-8")


def test_runs_with_different_limits_are_not_compared(limited: RunConfig, quiet: Console) -> None:
    run(limited, quiet)
    run(limited.model_copy(update={"max_context_length": 48}), quiet)
    run(limited.model_copy(update={"max_context_length": None}), quiet)
    results = read_runs([limited.out])
    boards = make_boards(results)
    assert sorted(str(board.conditions["max_context_length"]) for board in boards) == ["32", "48", "None"]
    folders, problems = to_folders([cell for cell in results.cells if cell.press == "none"])
    names = {path.parent.name for path in folders}
    assert problems == []
    assert {name.rpartition("__")[2] for name in names} == {"max_context32", "max_context48", "0.00"}


def test_cells_without_a_limit_keep_their_names(limited: RunConfig, quiet: Console) -> None:
    """Results from before the limit existed are found again."""
    config = limited.model_copy(update={"max_context_length": None, "presses": ("none",)})
    run(config, quiet)
    (spec,) = (json.loads(path.read_text()) for path in config.out.glob("cells/*/cell.json"))
    assert not {"max_context_length", "model_kwargs"} & spec.keys()


def test_arguments_for_loading_are_part_of_a_cell(limited: RunConfig, quiet: Console) -> None:
    config = limited.model_copy(update={"model_kwargs": {"attn_implementation": "eager"}, "presses": ("none",)})
    result = run(config, quiet)
    assert result.record["attention"] == "eager"
    assert result.record["config"]["model_kwargs"] == {"attn_implementation": "eager"}
    assert [cell.spec["model_kwargs"] for cell in result.cells] == [{"attn_implementation": "eager"}]
