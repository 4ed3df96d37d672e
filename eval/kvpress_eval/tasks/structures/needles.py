# SPDX-License-Identifier: Apache-2.0
"""Needles in a haystack: facts among filler; the question refers to some of them."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvpress_eval.tasks.filler import REPEAT
from kvpress_eval.tasks.languages.base import Fact
from kvpress_eval.tasks.sample import Query, Spans
from kvpress_eval.tasks.scene import Scene, Task


@dataclass(frozen=True)
class Needles:
    """Facts about different things; the answer is all values of the first ones."""

    keys: int = 1
    """Number of things."""
    asked: int = 1
    """Number of things in the question."""
    values: int = 1
    """Values per thing."""
    key: Literal["words", "uuids"] = "words"
    """Form of a thing."""
    value: Literal["numbers", "uuids"] = "numbers"
    """Form of a value."""
    haystack: Literal["filler", "repeat", "needles"] = "filler"
    """Text around the facts: the filler of the run, a refrain, or further needles."""

    def __call__(self, scene: Scene) -> tuple[str, Spans, Query]:
        """Build a context; a short one has fewer distractors."""
        groups = [self._group(scene, key) for key in self._draw_keys(scene, self.keys)]
        chains = [[scene.language.state(fact) for fact in group] for group in groups]
        room = scene.capacity(chains[0][0], self.asked * self.values, self.keys * self.values) // self.values
        context, spans = scene.weave(chains[: self.asked], chains[self.asked : room], self._hay(scene, groups))
        if self.values > 1:
            return context, spans, scene.language.ask_all_values(groups[0])
        return context, spans, scene.language.ask_facts([group[0] for group in groups[: self.asked]])

    def _group(self, scene: Scene, key: str) -> list[Fact]:
        """Return the facts about one key: one attribute with several values."""
        language = scene.language
        attribute = scene.rng.choice(language.countable_attributes if self.values > 1 else language.attributes)
        return [Fact(attribute, key, self._draw_value(scene)) for _ in range(self.values)]

    def _hay(self, scene: Scene, groups: list[list[Fact]]) -> Iterator[str] | None:
        if self.haystack == "repeat":
            return REPEAT.sentences(scene.language, scene.rng)
        if self.haystack == "needles":
            return self._others(scene, {group[0].key for group in groups})
        return None

    def _others(self, scene: Scene, used: set[str]) -> Iterator[str]:
        while True:
            (key,) = self._draw_keys(scene, 1)
            if key not in used:
                for fact in self._group(scene, key):
                    yield scene.language.state(fact)

    def _draw_keys(self, scene: Scene, count: int) -> list[str]:
        if self.key == "uuids":
            return [draw_uuid(scene.rng) for _ in range(count)]
        return scene.language.draw_keys(scene.rng, count)

    def _draw_value(self, scene: Scene) -> str:
        return draw_uuid(scene.rng) if self.value == "uuids" else scene.language.draw_value(scene.rng)


def draw_uuid(rng: random.Random) -> str:
    """Return a random UUID: 36 characters, of which no part gives away another."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


TASKS = {
    "niah_single": Task(Needles()),
    "niah_single_1": Task(Needles(haystack="repeat")),
    "niah_single_2": Task(Needles()),
    "niah_single_3": Task(Needles(value="uuids")),
    "niah_multikey": Task(Needles(keys=16)),
    "niah_multikey_1": Task(Needles(keys=4)),
    "niah_multikey_2": Task(Needles(haystack="needles")),
    "niah_multikey_3": Task(Needles(haystack="needles", key="uuids", value="uuids")),
    "niah_multivalue": Task(Needles(values=4)),
    "niah_multiquery": Task(Needles(keys=4, asked=4)),
}
TRAINED = {
    "niah_single": Task(Needles()),
    "niah_multikey": Task(Needles(keys=16)),
    "niah_multivalue": Task(Needles(keys=2, values=2)),
    "niah_multiquery": Task(Needles(keys=8, asked=2)),
}
