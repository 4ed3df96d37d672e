# SPDX-License-Identifier: Apache-2.0
"""Where a context is put together: needles spread among filler, to a given number of tokens."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from transformers import PreTrainedTokenizerBase

from kvpress_eval.tasks.filler import NOISE, Filler
from kvpress_eval.tasks.languages.base import Language
from kvpress_eval.tasks.languages.english import EnglishLanguage
from kvpress_eval.tasks.questions import Published, QuestionSet
from kvpress_eval.tasks.sample import Query, Spans

Chain = Sequence[str]
"""Sentences that must appear in this order."""

SHORT, LONG = 32, 128
"""Tokens for a number or a name, and for four values, a uuid or ten words."""

_MISSES = 30
"""Filler sentences tried before a gap is left open at the end of the context."""
_SAMPLE = 50
"""Items whose mean length says how many fit."""


@dataclass(frozen=True)
class _Needle:
    at: float
    text: str
    asked: bool


@dataclass(frozen=True)
class Scene:
    """Everything a task needs to build one context: randomness, wording, room and where to hide the answer.

    `depth` puts the sentences the question is about at that fraction of the context; None spreads them
    uniformly, as the distractors always are. `index` is the number of the sample and `seed` that of the run, for tasks
    that draw from a set without repeating themselves.
    """

    rng: random.Random
    language: Language
    tokenizer: PreTrainedTokenizerBase
    length: int
    depth: float | None = None
    filler: Filler = NOISE
    questions: QuestionSet | None = None
    seed: int = 0
    index: int = 0
    _costs: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

    @property
    def prose(self) -> EnglishLanguage:
        """The language, for the tasks that only a full one words."""
        return cast(EnglishLanguage, self.language)

    def cost(self, piece: str) -> int:
        """Return the number of tokens of a piece of text by itself."""
        if piece not in self._costs:
            self._costs[piece] = len(self.tokenizer(piece, add_special_tokens=False)["input_ids"])
        return self._costs[piece]

    def total(self, text: str) -> int:
        """Return the number of tokens of a whole context, special tokens included."""
        return len(self.tokenizer(text)["input_ids"])

    def capacity(self, sentence: str, least: int, most: int) -> int:
        """Return how many sentences like this one fill half of the room, within [least, most]."""
        return max(least, min(most, self.length // 2 // self.cost(sentence)))

    def fit(self, write: Callable[[int], str], least: int) -> str:
        """Return the context `write(n)` for about the largest n, at least `least`, that has at most `length` tokens."""
        low, best = least, write(least)
        if self.total(best) > self.length:
            raise ValueError(f"length {self.length} is too short: the fewest items take {self.total(best)} tokens")
        sample = max(least, _SAMPLE)
        size = self.total(write(sample))
        each = (self.total(write(2 * sample)) - size) / sample
        count, high = max(least + 1, sample + int((self.length - size) / each) + 1), sys.maxsize
        while low < count < high:
            text = write(count)
            excess = self.total(text) - self.length
            if excess <= 0:
                low, best = count, text
                count += int(-excess / each)
            else:
                high = count
                count -= max(1, int(excess / each))
        return best

    def weave(
        self, asked: Sequence[Chain], others: Sequence[Chain] = (), filler: Iterator[str] | None = None
    ) -> tuple[str, Spans]:
        """Return a context of at most `length` tokens and the character ranges of the `asked` sentences.

        `filler` is what stands between the sentences, if not the filler of the run.
        """
        needles = [needle for chain in asked for needle in self._place(chain, asked=True)]
        needles += [needle for chain in others for needle in self._place(chain, asked=False)]
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

    def _place(self, chain: Chain, *, asked: bool) -> list[_Needle]:
        if asked and self.depth is not None:
            points = [self.depth] * len(chain)
        else:
            points = sorted(self.rng.random() for _ in chain)
        return [_Needle(at, text, asked) for at, text in zip(points, chain, strict=True)]

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
    """A structure of contexts, and how many tokens an answer may need.

    An answer that is not `placed` stands nowhere in particular, so that a depth means nothing. A `plain` one can be worded in
    the language of the reference model as well. `questions` says where those come from that a task does not make itself.
    """

    build: Callable[[Scene], tuple[str, Spans, Query]]
    room: int = LONG
    placed: bool = True
    plain: bool = False
    questions: Published | None = None


def _join(needles: Sequence[_Needle], filler: Sequence[str]) -> tuple[str, Spans]:
    """Concatenate the filler with each needle before the sentence at its fraction of the way."""
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    size = done = 0
    for needle in needles:
        slot = min(len(filler), int(needle.at * (len(filler) + 1)))
        pieces += filler[done:slot]
        size += sum(map(len, filler[done:slot]))
        done = slot
        if needle.asked:
            spans.append((size, size + len(needle.text)))
        pieces.append(needle.text)
        size += len(needle.text)
    return "".join([*pieces, *filler[done:]]), tuple(spans)
