# SPDX-License-Identifier: Apache-2.0
"""Generated tasks, of any length; every file in `structures` registers its tasks.

Tasks of RULER (Hsieh et al., 2024, arXiv:2404.06654) have the same names as there.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvpress_eval.common.discovery import modules_of
from kvpress_eval.common.errors import unknown_name
from kvpress_eval.tasks.filler import NOISE, Filler, read_filler
from kvpress_eval.tasks.languages import LANGUAGES, Language
from kvpress_eval.tasks.questions import QuestionSet, read_questions
from kvpress_eval.tasks.sample import Sample
from kvpress_eval.tasks.scene import LONG, SHORT, Scene, Task
from kvpress_eval.tasks.source import Kind, Source, TaskSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STRUCTURES = modules_of("kvpress_eval.tasks.structures")
TASKS: dict[str, Task] = {name: task for module in _STRUCTURES for name, task in module.TASKS.items()}
"""Every task with its structure in English."""
TRAINED: dict[str, Task] = {
    name: task for module in _STRUCTURES for name, task in getattr(module, "TRAINED", {}).items()
}
"""Tasks with the structures that the reference model was trained on."""


def worded(language: str) -> Mapping[str, Task]:
    """Return the tasks that a language has words for, with their structure in this language."""
    if language != "reference":
        return TASKS
    return {**TRAINED, **{name: task for name, task in TASKS.items() if task.plain}}


def answer_room(task: str, language: str) -> int:
    """Return the maximum tokens of an answer: short in the reference language, that of the task in English."""
    if language == "reference":
        return SHORT
    return TASKS[task].room if task in TASKS else LONG


def generate(
    task: str,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    count: int,
    *,
    language: Language,
    seed: int = 0,
    depth: float | None = None,
    filler: Filler = NOISE,
    questions: QuestionSet | None = None,
) -> list[Sample]:
    """Return `count` samples with contexts of at most `length` tokens.

    Sample `i` depends on `i` and on the arguments except `count`, so that a larger `count` keeps the first samples.

    Raises:
        ValueError: the language has no such task, or `length` is too short.
    """
    tasks = worded(language.name)
    if task not in tasks:
        raise ValueError(unknown_name("task", task, tasks))
    samples = []
    for index in range(count):
        name = _sample_id(task, length, seed, index)
        rng = random.Random(f"{language.name}-{name}")  # noqa: S311  # reproducible, not secret
        scene = Scene(rng, language, tokenizer, length, depth, filler, questions, seed, index)
        context, spans, query = tasks[task].build(scene)
        samples.append(Sample(name, task, length, context, query, spans))
    return samples


def _expand(names: Sequence[str], request: TaskSettings) -> list[Source]:
    filler = read_filler(request.filler)
    return [source for name in names for source in _sources(name, filler, request)]


def _sources(name: str, filler: Filler, request: TaskSettings) -> list[Source]:
    task, wording, seed = TASKS[name], request.wording, request.seed
    identity: dict[str, Any] = {"seed": seed, "language": wording, "filler": filler.name}
    questions = read_questions(task.questions, request.data_dir) if task.questions else None
    if questions:
        identity["questions"] = questions.origin
    settings = {"language": LANGUAGES[wording], "seed": seed, "filler": filler, "questions": questions}
    return [
        Source(
            name,
            length,
            [_sample_id(name, length, seed, index) for index in range(request.samples)],
            partial(_make, name, length, request.samples, {**settings, "depth": depth}),
            {**identity, "depth": depth},
            request.max_new_tokens or answer_room(name, wording),
        )
        for length in request.lengths
        for depth in ((request.depths or (request.depth,)) if task.placed else (None,))
    ]


def _make(
    name: str, length: int, count: int, settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    return generate(name, tokenizer, length, count, **settings)


def _sample_id(task: str, length: int, seed: int, index: int) -> str:
    return f"{task}-{length}-{seed}-{index}"


KIND = Kind(TASKS, _expand)
