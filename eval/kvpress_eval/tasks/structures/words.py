# SPDX-License-Identifier: Apache-2.0
"""Count words of a list: answers that depend on the whole context."""

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
    """Build a list of words; one makes up 20 to 40% of it, every other at most a third of that."""
    rng, language = scene.rng, scene.language
    top, *others = rng.sample(language.words, len(language.words))
    share, seed = rng.uniform(0.2, 0.4), rng.getrandbits(64)
    context = scene.fit(lambda count: language.list_words(_top_heavy(seed, top, others, share, count)), minimum=4)
    return context, (), language.ask_most_common([top])


@dataclass(frozen=True)
class CommonWords:
    """List in which some words are up to ten times as frequent as all others; the answer is all of these.

    Common words make up a third of the list, as long as it has fewer than 900 words. From there on a common word occurs 30
    times and an uncommon one 3 times; in a shorter list both are rarer.
    """

    common: int = 10
    """Number of common words."""
    times: int = 30
    """Maximum occurrences of a common word."""

    def __call__(self, scene: Scene) -> tuple[str, Spans, Query]:
        """Build a context."""
        rng, prose = scene.rng, scene.prose
        # A word has at least two tokens, so length // 3 uncommon words suffice; in a long list each occurs three times.
        words = prose.draw_words(rng, self.common + min(scene.length // 3, 20 * self.times + scene.length // 12))
        top, others = words[: self.common], words[self.common :]
        seed = rng.getrandbits(64)
        context = scene.fit(
            lambda count: prose.list_words(self._list(seed, top, others, count)), minimum=3 * self.common
        )
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
    """Coded words with Zipf frequencies: word k has a share of k^-2 / zeta(2), and dots replace the first word.

    The answer is the three most frequent words after the dots.
    """

    num_answers: int = 3
    """Number of words in the answer."""
    letters: int = 6
    """Letters of a word."""

    def __call__(self, scene: Scene) -> tuple[str, Spans, Query]:
        """Build a context."""
        seed, minimum = scene.rng.getrandbits(64), 2 * (self.num_answers + 1) ** 2
        context = scene.fit(lambda count: scene.prose.code(self._text(seed, count)), minimum)
        return context, (), scene.prose.ask_most_frequent(self._words(seed, self.num_answers + 1)[1:])

    def _text(self, seed: int, count: int) -> list[str]:
        """Return about `count` words in random order; the last word of the answer is more frequent than all after it."""
        times = [int(count * 6 / (math.pi * rank) ** 2) for rank in range(1, math.isqrt(count) + 1)]
        times = [n if rank <= self.num_answers else min(n, times[self.num_answers] - 1) for rank, n in enumerate(times)]
        text = [word for word, n in zip(self._words(seed, len(times)), times, strict=True) for _ in range(n)]
        random.Random(seed).shuffle(text)  # noqa: S311  # reproducible, not secret
        return text

    def _words(self, seed: int, count: int) -> list[str]:
        """Return the dots and different words; the list for a larger count begins with the same words."""
        rng = random.Random(seed)  # noqa: S311  # reproducible, not secret
        words = {_DOTS: None}
        while len(words) < count:
            words["".join(rng.choices(string.ascii_lowercase, k=self.letters))] = None
        return list(words)


def _top_heavy(seed: int, top: str, others: Sequence[str], share: float, count: int) -> list[str]:
    rng = random.Random(seed)  # noqa: S311  # reproducible, not secret
    repeats = max(3, int(count * share))
    limit = max(1, repeats // 3)
    fillers: list[str] = []
    for word in others:
        fillers += [word] * rng.randint(1, limit)
        if len(fillers) >= count - repeats:
            break
    words = fillers[: max(0, count - repeats)] + [top] * repeats
    rng.shuffle(words)
    return words


TASKS = {"cwe": Task(CommonWords(), placed=False), "fwe": Task(FrequentWords(), LONG // 2, placed=False)}
TRAINED = {"cwe": Task(most_common, placed=False)}
