"""Needles in a haystack: facts hidden among filler, some of them asked for."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from kvpress_eval.languages.base import Fact
from kvpress_eval.tasks.filler import REPEAT
from kvpress_eval.tasks.sample import Query, Spans
from kvpress_eval.tasks.scene import Scene


@dataclass(frozen=True)
class Needles:
    """Facts about `keys` different things, each with `values` values; the question asks for all values of the first ones.

    `haystack` is what surrounds them: the filler of the run, always a refrain, or needles like those asked for.
    """

    keys: int = 1
    asked: int = 1
    values: int = 1
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    haystack: Literal["filler", "repeat", "needles"] = "filler"

    def __call__(self, scene: Scene) -> tuple[str, Spans, Query]:
        """Build a context; a short one holds fewer of the facts that are not asked for."""
        groups = [self._group(scene, key) for key in self._draw_keys(scene, self.keys)]
        chains = [[scene.language.state(fact) for fact in group] for group in groups]
        room = scene.capacity(chains[0][0], self.asked * self.values, self.keys * self.values) // self.values
        context, spans = scene.weave(chains[: self.asked], chains[self.asked : room], self._hay(scene, groups))
        if self.values > 1:
            return context, spans, scene.language.ask_all_values(groups[0])
        return context, spans, scene.language.ask_facts([group[0] for group in groups[: self.asked]])

    def _group(self, scene: Scene, key: str) -> list[Fact]:
        """Return the facts about one key: the same attribute with several values."""
        language = scene.language
        attribute = scene.rng.choice(language.countable_attributes if self.values > 1 else language.attributes)
        return [Fact(attribute, key, self._draw_value(scene)) for _ in range(self.values)]

    def _hay(self, scene: Scene, groups: list[list[Fact]]) -> Iterator[str] | None:
        if self.haystack == "repeat":
            return REPEAT.sentences(scene.language, scene.rng)
        if self.haystack == "needles":
            return self._others(scene, {group[0].key for group in groups})
        return None

    def _others(self, scene: Scene, taken: set[str]) -> Iterator[str]:
        while True:
            (key,) = self._draw_keys(scene, 1)
            if key not in taken:
                for fact in self._group(scene, key):
                    yield scene.language.state(fact)

    def _draw_keys(self, scene: Scene, count: int) -> list[str]:
        if self.key == "uuids":
            return [draw_uuid(scene.rng) for _ in range(count)]
        return scene.language.draw_keys(scene.rng, count)

    def _draw_value(self, scene: Scene) -> str:
        return draw_uuid(scene.rng) if self.value == "uuids" else scene.language.draw_value(scene.rng)


@dataclass(frozen=True)
class Turn:
    """Several facts, asked for one after another; what counts is the answer to question number `number`.

    The questions before it and their right answers are read after the context has been compressed, as in a conversation, so
    that each turn is measured by itself and a wrong answer harms no later one.
    """

    number: int
    keys: int = 8

    def __call__(self, scene: Scene) -> tuple[str, Spans, Query]:
        """Build a context; the first fact is the one that counts."""
        language, rng = scene.language, scene.rng
        keys = language.draw_keys(rng, self.keys)
        facts = [Fact(rng.choice(language.attributes), key, language.draw_value(rng)) for key in keys]
        facts = facts[: scene.capacity(language.state(facts[0]), self.number, self.keys)]
        context, spans = scene.weave([[language.state(facts[0])]], [[language.state(fact)] for fact in facts[1:]])
        query = language.ask_facts(facts[:1])
        told = [(language.ask_facts([fact]), fact.value) for fact in facts[1 : self.number]]
        before = "".join(f"{earlier.question}\n{earlier.answer_prefix} {value}." for earlier, value in told)
        return context, spans, replace(query, question=before + query.question)


def draw_uuid(rng: random.Random) -> str:
    """Return a random uuid: 36 characters that no model can guess from its parts."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))
