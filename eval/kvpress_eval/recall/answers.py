# SPDX-License-Identifier: Apache-2.0
"""Read the right answers behind a compressed cache (teacher forcing), all questions of a context in one batch.

Greedy decoding gives an answer exactly if each of its tokens is the most likely one after those before it. One pass over
question and answer shows this, and also the distributions of all answer tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from transformers import Cache, PreTrainedTokenizerBase

import kvpress
from kvpress.hf.models import with_cache
from kvpress_eval.common.errors import EvalError
from kvpress_eval.fidelity.continuation import config_errors
from kvpress_eval.fidelity.figures import kl_divergence
from kvpress_eval.run.generation import seeded
from kvpress_eval.run.models import Engine
from kvpress_eval.run.prompts import make_prompt
from kvpress_eval.tasks.sample import Sample


@dataclass(frozen=True)
class Question:
    """Prompt of a question with the tokens of its right answer."""

    first: list[int]
    """Tokens that are compressed."""
    second: list[int]
    """Tokens between them and the answer."""
    answer: list[int]
    """Tokens of the answer."""

    @property
    def total(self) -> int:
        """Number of all tokens."""
        return len(self.first) + len(self.second) + len(self.answer)


@dataclass(frozen=True)
class AnswerFigures:
    """Figures of one answer."""

    exact: bool
    """Every token of the answer is the most likely one."""
    kl: float
    """Mean KL over the tokens of the answer, full cache to press, in nats."""
    nll: float
    """Mean negative log-likelihood of the tokens of the answer, in nats."""


def make_question(tokenizer: PreTrainedTokenizerBase, sample: Sample, *, question_aware: bool) -> Question:
    """Return the tokens of a sample's question and right answer.

    The answer begins at the first token by which the prompt with the answer differs from the one without it, so that tokens
    which merge with the prefix are read as the tokenizer writes them.
    """
    query = sample.query
    answered = replace(sample, query=replace(query, answer_prefix=f"{query.answer_prefix} {query.answers[0]}"))
    without, full = (make_prompt(tokenizer, item, question_aware=question_aware) for item in (sample, answered))
    pairs = zip(without.second, full.second, strict=False)
    common = next((at for at, (token, second) in enumerate(pairs) if token != second), len(without.second))
    return Question(without.first, full.second[:common], full.second[common:])


@torch.inference_mode()
def read_answers(engine: Engine, press: str, cache: Cache, questions: Sequence[Question], seed: str) -> list[Tensor]:
    """Return the logits `[n, V]` that predict the n tokens of each answer behind `cache [1, ...]`.

    The questions are rows of one batch, padded on the right, where no token before sees the padding. The cache is not usable
    afterwards. `seed` names the state of torch's generator.

    Raises:
        ConfigError: the press does not suit the questions.
        EvalError: the press breaks the model's numbers.
    """
    rows = [[*question.second, *question.answer[:-1]] for question in questions]
    width = max(map(len, rows))
    pad = engine.tokenizer.pad_token_id
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=engine.model.device)
    first = min(len(question.second) for question in questions) - 1
    with seeded(seed), config_errors(press), kvpress.reading(engine.model, press):
        if len(rows) > 1:
            cache.batch_repeat_interleave(len(rows))
        logits = engine.model(ids, **with_cache(cache), use_cache=True, logits_to_keep=width - first).logits
    starts = [len(question.second) - 1 - first for question in questions]
    answers = [
        row[start : start + len(question.answer)].clone()
        for row, start, question in zip(logits, starts, questions, strict=True)
    ]
    if any(bool(answer.isnan().any()) for answer in answers):
        raise EvalError(f"press {press!r}: NaN in the logits")
    return answers


def figures_of(question: Question, full: Tensor, logits: Tensor) -> AnswerFigures:
    """Return the figures of an answer from its logits `[n, V]` and those of the full cache."""
    tokens = torch.tensor(question.answer, device=logits.device)
    return AnswerFigures(
        exact=bool((logits.argmax(-1) == tokens).all()),
        kl=float(kl_divergence(full[None], logits[None]).mean()),
        nll=float(F.cross_entropy(logits.float(), tokens)),
    )
