# SPDX-License-Identifier: Apache-2.0
"""What stands between the facts of a context: noise, a refrain, or the sentences of a text."""

from __future__ import annotations

import hashlib
import random
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from kvpress_eval.common.errors import DataError
from kvpress_eval.tasks.languages.base import Language
from kvpress_eval.tasks.local import PREFIX, reading

KINDS = ("noise", "repeat")
"""Filler that needs no file; anything else is `file:PATH`."""

_LONGEST = 240
"""Characters of a sentence of a text; longer ones are broken, so that a context can be filled to its length."""


@dataclass(frozen=True)
class Filler:
    """Sentences that no question is about; `name` is all that decides them, by the hash of the text if there is one."""

    name: str = "noise"
    text: tuple[str, ...] = ()

    def sentences(self, language: Language, rng: random.Random) -> Iterator[str]:
        """Yield sentences without end; those of a text in its order, from a random one on."""
        if self.name == "noise":
            while True:
                yield language.filler(rng)
        text = self.text or language.refrain
        yield from islice(cycle(text), rng.randrange(len(text)), None)


NOISE, REPEAT = Filler("noise"), Filler("repeat")


def read_filler(spec: str) -> Filler:
    """Return the filler that `noise`, `repeat` or `file:PATH` stands for."""
    if not spec.startswith(PREFIX):
        return Filler(spec)
    path = Path(spec.removeprefix(PREFIX))
    with reading(path, "filler text"):
        raw = path.read_bytes()
        sentences = _split(raw.decode())
    if not sentences:
        raise DataError(f"filler text {path} holds no words")
    return Filler(f"sha256:{hashlib.sha256(raw).hexdigest()}", sentences)


def _split(text: str) -> tuple[str, ...]:
    """Return the sentences of a text, each with a leading space and no other white space than single spaces."""
    sentences = re.split(r"(?<=[.!?])\s+|(?<=[。\uff01\uff1f])", text)
    plain = (" ".join(sentence.split()) for sentence in sentences)
    return tuple(f" {piece}" for sentence in plain for piece in textwrap.wrap(sentence, _LONGEST))
