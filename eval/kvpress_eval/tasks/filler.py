# SPDX-License-Identifier: Apache-2.0
"""Filler between the facts of a context: noise, a refrain, or the sentences of a text."""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice

from kvpress_eval.tasks.languages.base import Language
from kvpress_eval.tasks.texts import read_text

KINDS = ("noise", "repeat")
"""Generated filler; other settings name a real text."""

_LONGEST = 240
"""Maximum characters of a sentence; longer ones are split, so that a context can be filled to its length."""


@dataclass(frozen=True)
class Filler:
    """Sentences that no question refers to."""

    name: str = "noise"
    """Identity of the filler: `noise`, `repeat`, or that of its text, with a hash."""
    text: tuple[str, ...] = ()
    """Sentences of a text; empty for noise and the refrain."""

    def sentences(self, language: Language, rng: random.Random) -> Iterator[str]:
        """Yield sentences without end; a text is read in order from a random sentence on, and repeated."""
        if self.name == "noise":
            while True:
                yield language.filler(rng)
        text = self.text or language.refrain
        yield from islice(cycle(text), rng.randrange(len(text)), None)


NOISE, REPEAT = Filler("noise"), Filler("repeat")


def read_filler(spec: str) -> Filler:
    """Return the filler of a setting: `noise`, `repeat`, or the sentences of a real text.

    Raises:
        DataError: the text cannot be read or is empty.
    """
    if spec in KINDS:
        return Filler(spec)
    text = read_text(spec)
    return Filler(text.identity, tuple(sentence for document in text.documents for sentence in _split(document)))


def _split(text: str) -> tuple[str, ...]:
    """Return the sentences of a text, each with a leading space, and white space reduced to single spaces."""
    sentences = re.split(r"(?<=[.!?])\s+|(?<=[。\uff01\uff1f])", text)
    plain = (" ".join(sentence.split()) for sentence in sentences)
    return tuple(f" {piece}" for sentence in plain for piece in textwrap.wrap(sentence, _LONGEST))
