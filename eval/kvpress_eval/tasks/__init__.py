"""Tasks: what facts a context holds, what is asked about them, and what answer is right."""

from __future__ import annotations

import random
from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

from kvpress_eval.errors import unknown_name
from kvpress_eval.languages import Language
from kvpress_eval.tasks import needles, tracking, words
from kvpress_eval.tasks.sample import Query, Sample, Spans
from kvpress_eval.tasks.scene import Scene
from kvpress_eval.tasks.scoring import score

TASKS: dict[str, Callable[[Scene], tuple[str, Spans, Query]]] = {
    "niah_single": needles.single,
    "niah_multikey": needles.multikey,
    "niah_multivalue": needles.multivalue,
    "niah_multiquery": needles.multiquery,
    "vt": tracking.variable_tracking,
    "cwe": words.most_common,
}


def generate(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    count: int,
    *,
    language: Language,
    seed: int = 0,
    depth: float | None = None,
) -> list[Sample]:
    """Return `count` samples with contexts of at most `length` tokens.

    Sample `i` depends on the arguments and on `i` only, so that asking for more samples keeps the first ones.
    """
    if task not in TASKS:
        raise ValueError(unknown_name("task", task, TASKS))
    samples = []
    for index in range(count):
        name = sample_id(task, length, seed, index)
        rng = random.Random(f"{language.name}-{name}")  # noqa: S311  # reproducible, not secret
        context, spans, query = TASKS[task](Scene(rng, language, tokenizer, length, depth))
        samples.append(Sample(name, task, length, context, query, spans))
    return samples


def sample_id(task: str, length: int, seed: int, index: int) -> str:
    """Return the name of a generated sample."""
    return f"{task}-{length}-{seed}-{index}"


__all__ = ["TASKS", "Query", "Sample", "generate", "sample_id", "score"]
