"""Rows as LongBench publishes them, and the tasks and cells that are made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpress_eval.cells import expand_tasks, make_cells
from kvpress_eval.config import RunConfig
from kvpress_eval.longbench.tasks import LongBenchTask
from kvpress_eval.tasks import Sample
from transformers import PreTrainedTokenizerBase


def question(number: int, **fields: Any) -> dict[str, Any]:
    """A row of version 1, some of its fields changed."""
    return {
        "input": f"Question: How far is star {number}?\nType:",
        "context": "Question: Who wrote it?\nType: Human\n" * 5,
        "answers": ["Number"],
        "length": 4000 * number,
        "dataset": "trec",
        "language": "en",
        "all_classes": ["Number", "Human"],
        "_id": f"id{number}",
    } | fields


def choice(number: int, **fields: Any) -> dict[str, Any]:
    """A row of version 2, some of its fields changed."""
    return {
        "_id": f"id{number}",
        "domain": "Code Repository Understanding",
        "sub_domain": "Code repo QA",
        "difficulty": "hard",
        "length": "short",
        "question": " Which? ",
        **{f"choice_{letter}": f"{letter.lower()} " for letter in "ABCD"},
        "answer": "C",
        "context": "  def f(): ...\n",
    } | fields


def expand(name: str, folder: Path | None, *lengths: int) -> list[LongBenchTask]:
    """The tasks that a name stands for, one per length in tokens (default 512)."""
    sources = expand_tasks(RunConfig(tasks=(name,), lengths=lengths or (512,), data_dir=folder))
    return [source for source in sources if isinstance(source, LongBenchTask)]


def only(name: str, folder: Path, tokenizer: PreTrainedTokenizerBase, length: int = 4096) -> list[Sample]:
    """The samples of the one task that a name stands for."""
    (task,) = expand(name, folder, length)
    config = RunConfig()
    samples = task.samples(config, tokenizer)
    assert [sample.id for sample in samples] == task.sample_ids(config)
    return samples


def cell_ids(config: RunConfig) -> list[str]:
    """The names of all cells of a run."""
    return [cell.id for cell in make_cells(config, expand_tasks(config), "w", "cpu", "bfloat16")]
