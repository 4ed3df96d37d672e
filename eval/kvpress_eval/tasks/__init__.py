"""Tasks: what facts a context holds, what is asked about them, and what answer is right."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from transformers import PreTrainedTokenizerBase

from kvpress_eval.errors import unknown_name
from kvpress_eval.languages.base import Language
from kvpress_eval.tasks.filler import NOISE, Filler
from kvpress_eval.tasks.needles import Needles, Turn
from kvpress_eval.tasks.questions import SOURCES, QuestionSet, answer_question
from kvpress_eval.tasks.retrieval import key_value, passkey
from kvpress_eval.tasks.sample import Query, Sample, Spans
from kvpress_eval.tasks.scene import Scene
from kvpress_eval.tasks.scoring import score
from kvpress_eval.tasks.tracking import VariableTracking
from kvpress_eval.tasks.words import CommonWords, FrequentWords, most_common

Task = Callable[[Scene], tuple[str, Spans, Query]]

RULER: dict[str, Task] = {
    "niah_single_1": Needles(haystack="repeat"),
    "niah_single_2": Needles(),
    "niah_single_3": Needles(value="uuids"),
    "niah_multikey_1": Needles(keys=4),
    "niah_multikey_2": Needles(haystack="needles"),
    "niah_multikey_3": Needles(haystack="needles", key="uuids", value="uuids"),
    "niah_multivalue": Needles(values=4),
    "niah_multiquery": Needles(keys=4, asked=4),
    "vt": VariableTracking(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    "qa_1": answer_question,
    "qa_2": answer_question,
}
"""The structures of RULER (Hsieh et al., 2024, arXiv:2404.06654) under its names."""

TRAINED: dict[str, Task] = {
    "niah_single": Needles(),
    "niah_multikey": Needles(keys=16),
    "niah_multivalue": Needles(keys=2, values=2),
    "niah_multiquery": Needles(keys=8, asked=2),
    "vt": VariableTracking(chains=2, hops=2),
    "cwe": most_common,
}
"""The structures that the reference model was trained on."""

TURNS: dict[str, Task] = {f"niah_turn_{number}": Turn(number) for number in (1, 2, 4, 8)}
"""Several questions about one context; the turn is the number of the one that counts."""

TASKS: dict[str, Task] = {**TRAINED, **TURNS, **RULER, "passkey": passkey, "kv_retrieval": key_value}
"""Every generated task; where two structures share a name, this is the one of RULER."""

UNPLACED = frozenset({"cwe", "fwe"})
"""Tasks whose answer stands nowhere in particular, so that a depth means nothing."""

_SHORT = 32
_ROOM = {"vt": 64, "fwe": 64, "qa_1": _SHORT, "qa_2": _SHORT, "passkey": _SHORT, "kv_retrieval": 64}
"""Tokens for answers that are short; others may take 128: four values, a uuid, ten words."""


def worded(language: str) -> Mapping[str, Task]:
    """Return the tasks that a language has words for, with the structure that they have in it."""
    return {**TRAINED, **TURNS} if language == "reference" else TASKS


def answer_room(task: str, language: str) -> int:
    """Return how many tokens an answer may need: short ones in the words of the reference model, lists in English."""
    return _SHORT if language == "reference" else _ROOM.get(task, 128)


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

    Sample `i` depends on the arguments and on `i` only, so that asking for more samples keeps the first ones.
    """
    tasks = worded(language.name)
    if task not in tasks:
        raise ValueError(unknown_name("task", task, tasks))
    samples = []
    for index in range(count):
        name = sample_id(task, length, seed, index)
        rng = random.Random(f"{language.name}-{name}")  # noqa: S311  # reproducible, not secret
        scene = Scene(rng, language, tokenizer, length, depth, filler, questions, seed, index)
        context, spans, query = tasks[task](scene)
        samples.append(Sample(name, task, length, context, query, spans))
    return samples


def sample_id(task: str, length: int, seed: int, index: int) -> str:
    """Return the name of a generated sample."""
    return f"{task}-{length}-{seed}-{index}"


__all__ = ["SOURCES", "TASKS", "TRAINED", "Query", "Sample", "generate", "sample_id", "score", "worded"]
