# SPDX-License-Identifier: Apache-2.0
"""Counting words of a list: answers that no single token of the context holds."""

from __future__ import annotations

import math
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice

from kvpress_eval.tasks.sample import Query, Spans
from kvpress_eval.tasks.scene import LONG, Scene, Task

_DOTS = "...."


def most_common(scene: Scene) -> tuple[str, Spans, Query]:
    """A list of words; one makes up 20 to 40% of it, every other at most a third of that."""
    rng, language = scene.rng, scene.language
    top, *others = rng.sample(language.words, len(language.words))
    share, seed = rng.uniform(0.2, 0.4), rng.getrandbits(64)
    context = scene.fit(lambda count: language.list_words(_top_heavy(seed, top, others, share, count)), least=4)
    return context, (), language.ask_most_common([top])


@dataclass(frozen=True)
class CommonWords:
    """A list in which some words stand up to ten times as often as all others; the question asks for all of those.

    A common word stands 30 times and an uncommon one 3 times where a third of the list holds the common ones; in a shorter
    list they stand less often.
    """

    common: int = 10
    times: int = 30

    def __call__(self, scene: Scene) -> tuple[str, Spans, Query]:
        """Build a context."""
        rng, prose = scene.rng, scene.prose
        # Two tokens a word at least, two thirds of them uncommon; in a long list each of those stands three times.
        words = prose.draw_words(rng, self.common + min(scene.length // 3, 20 * self.times + scene.length // 12))
        top, others = words[: self.common], words[self.common :]
        seed = rng.getrandbits(64)
        context = scene.fit(lambda count: prose.list_words(self._list(seed, top, others, count)), least=3 * self.common)
        return context, (), prose.ask_most_common(top)

    def _list(self, seed: int, top: Sequence[str], others: Sequence[str], count: int) -> list[str]:
        times = min(self.times, max(2, count // (3 * self.common)))
        few = max(1, times // 10)
        rare = islice(cycle(others), (count - times * self.common) // few)
        words = [*top] * times + [*rare] * few
        random.Random(seed).shuffle(words)  # noqa: S311  # reproducible, not secret
        return words


@dataclass(frozen=True)
class FrequentWords:
    """Coded words with Zipf frequencies, word k a share of k^-2 / zeta(2); dots stand for the first one.

    The question asks for the three words after the dots.
    """

    asked: int = 3
    letters: int = 6

    def __call__(self, scene: Scene) -> tuple[str, Spans, Query]:
        """Build a context."""
        seed, least = scene.rng.getrandbits(64), 2 * (self.asked + 1) ** 2
        context = scene.fit(lambda count: scene.prose.code(self._text(seed, count)), least)
        return context, (), scene.prose.ask_most_frequent(self._words(seed, self.asked + 1)[1:])

    def _text(self, seed: int, count: int) -> list[str]:
        """Return about `count` words in random order; the last word asked for stands more often than those after it."""
        times = [int(count * 6 / (math.pi * rank) ** 2) for rank in range(1, math.isqrt(count) + 1)]
        times = [n if rank <= self.asked else min(n, times[self.asked] - 1) for rank, n in enumerate(times)]
        text = [word for word, n in zip(self._words(seed, len(times)), times, strict=True) for _ in range(n)]
        random.Random(seed).shuffle(text)  # noqa: S311  # reproducible, not secret
        return text

    def _words(self, seed: int, count: int) -> list[str]:
        """Return the dots and different words; a larger count starts with the same ones."""
        rng = random.Random(seed)  # noqa: S311  # reproducible, not secret
        words = {_DOTS: None}
        while len(words) < count:
            words["".join(rng.choices(string.ascii_lowercase, k=self.letters))] = None
        return list(words)


def _top_heavy(seed: int, top: str, others: Sequence[str], share: float, count: int) -> list[str]:
    rng = random.Random(seed)  # noqa: S311  # reproducible, not secret
    repeats = max(3, int(count * share))
    most = max(1, repeats // 3)
    rest: list[str] = []
    for word in others:
        rest += [word] * rng.randint(1, most)
        if len(rest) >= count - repeats:
            break
    words = rest[: max(0, count - repeats)] + [top] * repeats
    rng.shuffle(words)
    return words


TASKS = {"cwe": Task(CommonWords(), placed=False), "fwe": Task(FrequentWords(), LONG // 2, placed=False)}
TRAINED = {"cwe": Task(most_common, placed=False)}
