"""Where a context is put together: needles spread among filler, to a given number of tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from kvpress_eval.languages.base import Language
from kvpress_eval.tasks.sample import Spans

Chain = Sequence[str]
"""Sentences that must appear in this order."""

_MISSES = 30
"""Filler sentences tried before a gap is left open at the end of the context."""


@dataclass(frozen=True)
class _Needle:
    at: float
    text: str
    asked: bool


@dataclass(frozen=True)
class Scene:
    """Everything a task needs to build one context: randomness, wording, room and where to hide the answer.

    `depth` puts the sentences the question is about at that fraction of the context; None spreads them
    uniformly, as the distractors always are.
    """

    rng: random.Random
    language: Language
    tokenizer: PreTrainedTokenizerBase
    length: int
    depth: float | None = None
    _costs: dict[str, int] = field(default_factory=dict, repr=False, compare=False)

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

    def weave(self, asked: Sequence[Chain], others: Sequence[Chain] = ()) -> tuple[str, Spans]:
        """Return a context of at most `length` tokens and the character ranges of the `asked` sentences."""
        needles = [needle for chain in asked for needle in self._place(chain, asked=True)]
        needles += [needle for chain in others for needle in self._place(chain, asked=False)]
        needles.sort(key=lambda needle: needle.at)
        needed = self.total("") + sum(self.cost(needle.text) for needle in needles)
        filler = self._filler(self.length - needed)
        while True:
            text, spans = _join(needles, filler)
            excess = self.total(text) - self.length
            if excess <= 0:
                return text, spans
            if not filler:
                raise ValueError(f"length {self.length} is too short: the facts alone take {self.total(text)} tokens")
            while filler and excess > 0:
                excess -= self.cost(filler.pop())

    def _place(self, chain: Chain, *, asked: bool) -> list[_Needle]:
        if asked and self.depth is not None:
            points = [self.depth] * len(chain)
        else:
            points = sorted(self.rng.random() for _ in chain)
        return [_Needle(at, text, asked) for at, text in zip(points, chain, strict=True)]

    def _filler(self, room: int) -> list[str]:
        sentences: list[str] = []
        misses = 0
        while room > 0 and misses < _MISSES:
            sentence = self.language.filler(self.rng)
            if self.cost(sentence) > room:
                misses += 1
                continue
            sentences.append(sentence)
            room -= self.cost(sentence)
        return sentences


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
