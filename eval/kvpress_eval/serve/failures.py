# SPDX-License-Identifier: Apache-2.0
"""Failures of the engine: their record, and the test whether the engine can go on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvpress_eval.serve.batch import AnswerRow, Batch, PressSteps, PromptReader
from kvpress_eval.serve.metrics import Metrics
from kvpress_eval.serve.prefixes import Prefixes
from kvpress_eval.serve.requests import Event, GenerationJob, SamplingSettings
from kvpress_eval.serve.sampling import next_token
from kvpress_eval.serve.text import TextStream

LIMIT = 3
"""Failures in a row, with no finished answer in between, after which the engine tests itself."""


class Failures:
    """Failures of the engine since the last finished answer.

    A failure ends the requests of its stage, and the engine goes on. After `LIMIT` failures in a row, the requests may be at
    fault, or the engine: a test with a request of its own decides. A failure of the stage `round` has no request that could be
    at fault, so `LIMIT` of them in a row are fatal.

    Args:
        metrics: counts and logs failures.
        answers: whether the engine can still answer a short request of its own.
    """

    def __init__(self, metrics: Metrics, answers: Callable[[], bool]) -> None:
        self.metrics, self.answers = metrics, answers
        self._stages: list[str] = []

    def add(self, stage: str, jobs: Sequence[GenerationJob], error: BaseException) -> None:
        """Record a failure of a stage, which ends `jobs`."""
        self._stages.append(stage)
        self.metrics.count_failure(stage, jobs, error)

    def clear(self) -> None:
        """Forget the failures, since an answer is finished."""
        self._stages.clear()

    def is_fatal(self) -> bool:
        """Return whether the engine cannot go on."""
        if len(self._stages) < LIMIT:
            return False
        if self._stages.count("round") < LIMIT and self.answers():
            self.clear()
            return False
        return True


def any_answers(steps: Iterable[PressSteps], model: Any, tokenizer: Any, prefixes: Prefixes) -> bool:
    """Return whether any press still answers a prompt of two tokens: prefill, decode step, sampling and text."""
    return any(_answers(press_steps, model, tokenizer, prefixes) for press_steps in steps)


def _answers(steps: PressSteps, model: Any, tokenizer: Any, prefixes: Prefixes) -> bool:
    text = TextStream(tokenizer)
    job = GenerationJob("test", steps.press, (), (0, 1), 2, SamplingSettings(temperature=0), text, _ignore)
    try:
        prompt = PromptReader(job, steps, model, prefixes, len(job.prompt))
        prompt.read_part()
        assert prompt.logits is not None  # noqa: S101 - for type checkers
        assert prompt.cache is not None  # noqa: S101 - same
        row = AnswerRow(job, next_token(prompt.logits, job)[0])
        text.feed(row.token)
        next_token(Batch(steps, prompt.cache, row).step()[0], job)
    except BaseException as error:  # panics of Rust libraries are no `Exception`
        prefixes.metrics.count_failure("test", [job], error)
        return False
    return True


def _ignore(event: Event) -> None:
    """Drop an event."""
