# SPDX-License-Identifier: Apache-2.0
"""Rows as LongBench publishes them, and tasks and cells made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.cells import make_cells
from kvpress_eval.tasks.catalogue import expand_tasks
from kvpress_eval.tasks.sample import Sample
from kvpress_eval.tasks.source import Source
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


def expand(name: str, folder: Path | None, *lengths: int) -> list[Source]:
    """Return the tasks of a name, one per length in tokens (default 512)."""
    return expand_tasks(RunConfig(tasks=(name,), lengths=lengths or (512,), data_dir=folder))


def only(name: str, folder: Path, tokenizer: PreTrainedTokenizerBase, length: int = 4096) -> list[Sample]:
    """Return the samples of the only task of a name."""
    (task,) = expand(name, folder, length)
    samples = task.make(tokenizer)
    assert [sample.id for sample in samples] == task.ids
    return samples


def cell_ids(config: RunConfig) -> list[str]:
    """The names of all cells of a run."""
    return [cell.id for cell in make_cells(config, expand_tasks(config), "w", "cpu", "bfloat16")]
