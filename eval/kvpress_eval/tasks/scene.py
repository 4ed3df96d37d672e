# SPDX-License-Identifier: Apache-2.0
"""Build contexts of a given number of tokens: needles spread among filler."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from kvpress_eval.tasks.filler import NOISE, Filler
from kvpress_eval.tasks.languages.base import Language
from kvpress_eval.tasks.languages.english import EnglishLanguage
from kvpress_eval.tasks.questions import PublishedQuestions, QuestionSet
from kvpress_eval.tasks.sample import Query, Spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chain = Sequence[str]
"""Sentences that appear in this order."""

SHORT, LONG = 32, 128
"""Tokens of an answer: SHORT for a number or a name, LONG for four values, a uuid or ten words."""

_MISSES = 30
"""Filler sentences that may be too long for the remaining room before the context stays shorter."""
_SAMPLE = 50
"""Items whose mean length gives the first estimate of how many fit."""


@dataclass(frozen=True)
class _Needle:
    at: float
    """Fraction of the context before it."""
    text: str
    """The sentence."""
    is_target: bool
    """The question refers to it."""


@dataclass(frozen=True)
class Scene:
    """Inputs of a task for building one context."""

    rng: random.Random
    """Random numbers of this sample."""
    language: Language
    """Wording of facts and questions."""
    tokenizer: PreTrainedTokenizerBase
    """Counts tokens."""
    length: int
    """Maximum tokens of the context."""
    depth: float | None = None
    """Fraction of the context before the answer's sentences; None spreads them uniformly, as distractors always are."""
    filler: Filler = NOISE
    """Sentences between the needles."""
    questions: QuestionSet | None = None
    """Questions of a task that does not make its own."""
    seed: int = 0
    """Seed of the run, for tasks that draw from a set without repetition."""
    index: int = 0
    """Number of the sample in the run."""
    _costs: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def prose(self) -> EnglishLanguage:
        """The language as English, for tasks that the reference language has no words for."""
        return cast(EnglishLanguage, self.language)

    def cost(self, piece: str) -> int:
        """Return the number of tokens of a text, without special tokens."""
        if piece not in self._costs:
            self._costs[piece] = len(self.tokenizer(piece, add_special_tokens=False)["input_ids"])
        return self._costs[piece]

    def total(self, text: str) -> int:
        """Return the number of tokens of a context, special tokens included."""
        return len(self.tokenizer(text)["input_ids"])

    def capacity(self, sentence: str, minimum: int, maximum: int) -> int:
        """Return the number of sentences of this length that fill half of the context, within [minimum, maximum]."""
        return max(minimum, min(maximum, self.length // 2 // self.cost(sentence)))

    def fit(self, write: Callable[[int], str], minimum: int) -> str:
        """Return `write(n)` for about the largest n >= `minimum` that gives at most `length` tokens.

        Raises:
            ValueError: `write(minimum)` is too long.
        """
        low, best = minimum, write(minimum)
        if self.total(best) > self.length:
            raise ValueError(f"length {self.length} is too short: the fewest items take {self.total(best)} tokens")
        sample = max(minimum, _SAMPLE)
        size = self.total(write(sample))
        item_size = (self.total(write(2 * sample)) - size) / sample
        count, high = max(minimum + 1, sample + int((self.length - size) / item_size) + 1), sys.maxsize
        while low < count < high:
            text = write(count)
            excess = self.total(text) - self.length
            if excess <= 0:
                low, best = count, text
                count += int(-excess / item_size)
            else:
                high = count
                count -= max(1, int(excess / item_size))
        return best

    def weave(
        self, targets: Sequence[Chain], distractors: Sequence[Chain] = (), filler: Iterator[str] | None = None
    ) -> tuple[str, Spans]:
        """Return a context of at most `length` tokens, and the character ranges of the `targets`.

        The question refers to the targets and not to the distractors; `filler` replaces the filler of the run.

        Raises:
            ValueError: the sentences alone are too long.
        """
        needles = [needle for chain in targets for needle in self._place(chain, is_target=True)]
        needles += [needle for chain in distractors for needle in self._place(chain, is_target=False)]
        needles.sort(key=lambda needle: needle.at)
        needed = self.total("") + sum(self.cost(needle.text) for needle in needles)
        source = self.filler.sentences(self.language, self.rng) if filler is None else filler
        between = self._fill(source, self.length - needed)
        while True:
            text, spans = _join(needles, between)
            excess = self.total(text) - self.length
            if excess <= 0:
                return text, spans
            if not between:
                raise ValueError(f"length {self.length} is too short: the facts alone take {self.total(text)} tokens")
            while between and excess > 0:
                excess -= self.cost(between.pop())

    def _place(self, chain: Chain, *, is_target: bool) -> list[_Needle]:
        if is_target and self.depth is not None:
            points = [self.depth] * len(chain)
        else:
            points = sorted(self.rng.random() for _ in chain)
        return [_Needle(at, text, is_target) for at, text in zip(points, chain, strict=True)]

    def _fill(self, source: Iterator[str], room: int) -> list[str]:
        sentences: list[str] = []
        misses = 0
        for sentence in source:
            if self.cost(sentence) <= room:
                sentences.append(sentence)
                room -= self.cost(sentence)
            else:
                misses += 1
            if room <= 0 or misses == _MISSES:
                break
        return sentences


@dataclass(frozen=True)
class Task:
    """Structure of contexts and questions."""

    build: Callable[[Scene], tuple[str, Spans, Query]]
    """Builds context, spans of the answer, and query."""
    room: int = LONG
    """Tokens that an answer may need."""
    placed: bool = True
    """The answer stands at one point of the context, so that a depth applies."""
    plain: bool = False
    """The reference language has words for it too."""
    questions: PublishedQuestions | None = None
    """Published questions; None if the task makes its own."""


def _join(needles: Sequence[_Needle], filler: Sequence[str]) -> tuple[str, Spans]:
    """Return the filler with each needle inserted at its fraction of the sentences, and the spans of the targets."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    size = done = 0
    for needle in needles:
        slot = min(len(filler), int(needle.at * (len(filler) + 1)))
        pieces += filler[done:slot]
        size += sum(map(len, filler[done:slot]))
        done = slot
        if needle.is_target:
            spans.append((size, size + len(needle.text)))
        pieces.append(needle.text)
        size += len(needle.text)
    return "".join([*pieces, *filler[done:]]), tuple(spans)
