# SPDX-License-Identifier: Apache-2.0
"""Deterministic conversations: every generated token comes from a script, and logits are recorded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor

import kvpress
from kvpress import kernels
from kvpress.core.scoring import Scored
from tests.fuzz.cases import ROWS, Case
from tests.fuzz.models import DTYPES, model_of
from tests.fuzz.specs import Tree
from tests.models import VOCAB, grow, tokens

STEPS = 7
"""Number of generated tokens in the first turn; all but the last are read."""
SHORT, LONG = ((5, 5), (1, 4)), ((37, 5), (12, 4))
"""Lengths of the question and of the answer in later turns."""
LATER = {"1": (), "2": SHORT[:1], "3": SHORT, "long": LONG, "reading": SHORT[:1]}
"""Later turns of a case."""


def random_scores(seed: int, steps: int, count: int, vocabulary: int = VOCAB) -> Tensor:
    return torch.randn(steps, count, vocabulary, generator=torch.Generator().manual_seed(seed))


class Script(LogitsProcessor):
    """Records the model's logits and returns `scores [steps, rows, vocab]` instead, which make beams cross."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores
        self.heard: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        del input_ids
        self.heard.append(scores.clone())
        return self.scores[len(self.heard) - 1].to(scores)


@dataclass
class Turn:
    """Record of one turn."""

    logits: Tensor
    """Logits `[steps, rows, vocab]`."""
    positions: list[list[list[Tensor]]]
    """Slots of the cache's pairs after the turn, by layer, row and head."""
    new: int
    """New tokens that the turn read before it generated."""
    steps: int
    """Generated tokens."""
    evicts: bool
    """Whether the press acted on the prompt."""


@dataclass
class Talk:
    """A conversation in progress."""

    case: Case
    press: Any
    """A press or None."""
    rows: tuple[int, ...]
    """Rows of the case's batch."""
    chunk: int
    """Length of a chunk of the prompt, 0 for one pass."""
    cache: Any = None
    sequence: Tensor | None = None
    mask: Tensor | None = None
    turns: list[Turn] = field(default_factory=list)

    @property
    def model(self) -> Any:
        return model_of(self.case.family, self.case.dtype)

    @property
    def plan(self) -> list[tuple[int, int, bool]]:
        """Return for every turn the tokens of the user, the generated tokens, and whether the press acts after the prompt."""
        lengths = ROWS[self.case.rows]
        first = (max(lengths[row] for row in self.rows), STEPS, True)
        return [first, *((*turn, self.case.turns != "reading") for turn in LATER[self.case.turns])]

    def prompt(self) -> tuple[Tensor, Tensor | None]:
        """Return the first prompt and its mask, which is None without padding."""
        lengths = [ROWS[self.case.rows][row] for row in self.rows]
        longest = max(lengths)
        ids = torch.zeros(len(lengths), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for at, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
            ids[at, longest - length :] = tokens(1, length, 1000 * self.case.seed + row)[0]
            mask[at, longest - length :] = 1
        return ids, None if bool(mask.all()) else mask

    def turn(self) -> Turn:
        """Run the next turn of the plan."""
        number = len(self.turns)
        question, steps, evicts = self.plan[number]
        beams = self.case.beams if number == len(self.plan) - 1 else 1
        if self.sequence is None:
            self.sequence, self.mask = self.prompt()
            self.cache = DynamicCache(config=self.model.config)
        else:
            question_ids = [tokens(1, question, 1000 * self.case.seed + 10 * number + row) for row in self.rows]
            self.sequence = torch.cat([self.sequence, torch.cat(question_ids)], dim=1)
            self.mask = grow(self.mask, self.sequence.shape[1] - self.mask.shape[1]) if self.mask is not None else None
        seen = self.cache.get_seq_length() if number else 0
        if seen and beams > 1:
            self.cache.batch_repeat_interleave(beams)
        vocabulary = self.model.config.vocab_size
        seeds = [1000 * self.case.seed + 10 * number + row for row in self.rows]
        scores = [random_scores(seed, steps, beams, vocabulary) for seed in seeds]
        script = Script(torch.cat(scores, dim=1))
        new = self.sequence.shape[1] - seen
        mask = torch.ones_like(self.sequence) if self.mask is None and number else self.mask
        with self.block(evicts):
            self.sequence = self.model.generate(
                self.sequence,
                attention_mask=mask,
                past_key_values=self.cache,
                max_new_tokens=steps,
                num_beams=beams,
                do_sample=False,
                prefill_chunk_size=self.chunk or None,
                logits_processor=[script],
            )
        positions = [] if self.press is None else kvpress.kept_positions(self.cache)
        self.turns.append(Turn(torch.stack(script.heard), positions, new, steps, evicts))
        return self.turns[-1]

    def block(self, evicts: bool) -> AbstractContextManager[Any]:
        if self.press is None:
            return nullcontext()
        return self.press(self.model) if evicts else kvpress.reading(self.model, self.press)

    def copy(self) -> Talk:
        """Return a conversation that continues from here with a copy of the cache."""
        twin = copy.copy(self)
        twin.cache, twin.turns = copy.deepcopy(self.cache), list(self.turns)
        return twin


def talk(
    case: Case, tree: Tree | None, rows: tuple[int, ...] = (), chunk: int | None = None, noise: int | None = None
) -> Talk:
    """Run the conversation of a case: with the press of a tree or none, with some of its rows, with noise on its input."""
    conversation = begin(case, tree, rows, chunk)
    with noisy(case, noise):
        while len(conversation.turns) < len(conversation.plan):
            conversation.turn()
    return conversation


def begin(case: Case, tree: Tree | None, rows: tuple[int, ...] = (), chunk: int | None = None) -> Talk:
    """Return a conversation before its first turn."""
    torch.manual_seed(case.seed)
    press = None if tree is None else kvpress.press_from_dict(tree)
    every = tuple(range(len(ROWS[case.rows])))
    return Talk(case, press, rows or every, case.chunk if chunk is None else chunk)


QUERIES: ContextVar[bool] = ContextVar("queries", default=False)
"""Whether noise is also added to queries of encoded pairs."""


@contextmanager
def rounded_queries() -> Iterator[None]:
    """Let noisy runs of this block add noise to queries of encoded pairs too, which operators round to 16 bits."""
    token = QUERIES.set(True)
    try:
        yield
    finally:
        QUERIES.reset(token)


def decoded() -> AbstractContextManager[Any]:
    """Return a block in which encoded pairs are decoded before attention, without the operators that read codes."""
    return mock.patch.object(kernels, "serves", return_value=False)


@contextmanager
def noisy_queries(generator: torch.Generator) -> Iterator[None]:
    """Add half a unit of 16 bits to all queries of an operator, as large as its rounding; see `kernels.attention.contract`."""

    def changed(operator: Any) -> Any:
        def run(queries: Tensor, *arguments: Any) -> Any:
            signs = torch.randint(0, 2, queries.shape, generator=generator) * 2 - 1
            return operator(queries + queries.abs().amax(dim=(1, 2), keepdim=True) * 2.0**-16 * signs, *arguments)

        return run

    operators = {name: changed(getattr(kernels, name)) for name in ("decode", "decode_parts")}
    with mock.patch.multiple(kernels, **operators):
        yield


@contextmanager
def noisy_scores(seed: int, size: float) -> Iterator[None]:
    """Multiply scores by `1 - size` or `1 + size`, as sums in another order would; equal scores stay equal.

    Noise on tokens changes the scores of neighbours alike where one attention weight outweighs all others.
    """
    exact = Scored.scores.func

    def changed(scored: Scored) -> Tensor:
        scores = exact(scored)
        bits = scores.float().view(torch.int32).long() * (2 * seed + 1) * 2654435761
        return scores * (1 + size * ((bits >> 13 & 1) * 2 - 1))

    changed_scores = cached_property(changed)
    changed_scores.__set_name__(Scored, "scores")
    with mock.patch.object(Scored, "scores", changed_scores):
        yield


@contextmanager
def noisy(case: Case, seed: int | None) -> Iterator[None]:
    """Add noise to every embedded token and every score, as large as the rounding errors of the residual stream.

    Two sums per layer are rounded to the dtype, by up to half a unit in the last place each; here the sum is added at once.
    """
    if seed is None:
        yield
        return
    size = model_of(case.family, case.dtype).config.num_hidden_layers * torch.finfo(DTYPES[case.dtype]).eps
    generator = torch.Generator().manual_seed(seed)

    def change(module: Any, args: Any, output: Tensor) -> Tensor:
        del module, args
        signs = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
        return (output.double() * (1 + size * signs)).to(output.dtype)

    handle = model_of(case.family, case.dtype).get_input_embeddings().register_forward_hook(change)
    try:
        with noisy_scores(seed, size), noisy_queries(generator) if QUERIES.get() else nullcontext():
            yield
    finally:
        handle.remove()
