"""The most common word of a list: an answer that no single token of the context holds."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvpress_eval.tasks.sample import Query, Spans
from kvpress_eval.tasks.scene import Scene

_FEWEST = 4


def most_common(scene: Scene) -> tuple[str, Spans, Query]:
    """A list of words; one makes up 20 to 40% of it, every other at most a third of that."""
    rng, language = scene.rng, scene.language
    top, *others = rng.sample(language.words, len(language.words))
    share, seed = rng.uniform(0.2, 0.4), rng.getrandbits(64)
    frame = scene.total(language.list_words([top]))
    per_word = (scene.total(language.list_words(others)) - frame) / (len(others) - 1)
    count = max(_FEWEST, int((scene.length - frame) / per_word) + 1)
    while True:
        context = language.list_words(_words(seed, top, others, share, count))
        excess = scene.total(context) - scene.length
        if excess <= 0:
            return context, (), language.ask_most_common(top)
        if count == _FEWEST:
            raise ValueError(f"length {scene.length} is too short for a list of words")
        count = max(_FEWEST, count - max(1, int(excess / per_word)))


def _words(seed: int, top: str, others: Sequence[str], share: float, count: int) -> list[str]:
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
