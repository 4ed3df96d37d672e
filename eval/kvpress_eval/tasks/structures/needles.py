# SPDX-License-Identifier: Apache-2.0
"""Needles in a haystack: facts, a pass key or the entry of a dictionary; the question refers to some of them."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from kvpress_eval.tasks.filler import REPEAT
from kvpress_eval.tasks.languages.base import Fact
from kvpress_eval.tasks.sample import Query, Spans
from kvpress_eval.tasks.scene import LONG, SHORT, Scene, Task

_FEWEST = 2
"""Minimum entries of a dictionary."""


@dataclass(frozen=True)
class Needles:
    """Facts about different things; the answer is all values of the first ones."""

    keys: int = 1
    """Number of things."""
    num_queried: int = 1
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
        room = scene.capacity(chains[0][0], self.num_queried * self.values, self.keys * self.values) // self.values
        context, spans = scene.weave(
            chains[: self.num_queried], chains[self.num_queried : room], self._hay(scene, groups)
        )
        if self.values > 1:
            return context, spans, scene.language.ask_all_values(groups[0])
        return context, spans, scene.language.ask_facts([group[0] for group in groups[: self.num_queried]])

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
            return [_draw_uuid(scene.rng) for _ in range(count)]
        return scene.language.draw_keys(scene.rng, count)

    def _draw_value(self, scene: Scene) -> str:
        return _draw_uuid(scene.rng) if self.value == "uuids" else scene.language.draw_value(scene.rng)


@dataclass(frozen=True)
class Turn:
    """Questions about several facts, one after another; the answer to the last one is scored.

    Earlier questions and their right answers are read after the context has been compressed, as in a conversation. So each
    turn is measured separately, and a wrong answer does not affect a later turn.
    """

    number: int
    """Number of questions."""
    keys: int = 8
    """Maximum number of facts."""

    def __call__(self, scene: Scene) -> tuple[str, Spans, Query]:
        """Build a context; the answer of the last question is the first fact."""
        language, rng = scene.language, scene.rng
        keys = language.draw_keys(rng, self.keys)
        facts = [Fact(rng.choice(language.attributes), key, language.draw_value(rng)) for key in keys]
        facts = facts[: scene.capacity(language.state(facts[0]), self.number, self.keys)]
        context, spans = scene.weave([[language.state(facts[0])]], [[language.state(fact)] for fact in facts[1:]])
        query = language.ask_facts(facts[:1])
        answered = [(language.ask_facts([fact]), fact.value) for fact in facts[1 : self.number]]
        before = "".join(f"{earlier.question}\n{earlier.answer_prefix} {value}." for earlier, value in answered)
        return context, spans, replace(query, question=before + query.question)


def passkey(scene: Scene) -> tuple[str, Spans, Query]:
    """Build a refrain with a number of five digits (Mohtashami and Jaggi, 2023, arXiv:2305.16300)."""
    value = str(scene.rng.randrange(10_000, 100_000))
    refrain = REPEAT.sentences(scene.language, scene.rng)
    context, spans = scene.weave([[scene.prose.tell_passkey(value)]], filler=refrain)
    return context, spans, scene.prose.ask_passkey(value)


def key_value(scene: Scene) -> tuple[str, Spans, Query]:
    """Build a JSON dictionary of UUIDs; the answer is the value of one key (Liu et al., 2023, arXiv:2307.03172)."""
    key, value = _draw_uuid(scene.rng), _draw_uuid(scene.rng)
    seed = scene.rng.getrandbits(64)
    at = scene.rng.random() if scene.depth is None else scene.depth
    target = _entry(key, value)

    def write(count: int) -> str:
        rng = random.Random(seed)  # noqa: S311  # reproducible, not secret
        entries = [_entry(_draw_uuid(rng), _draw_uuid(rng)) for _ in range(count - 1)]
        entries.insert(round(at * (count - 1)), target)
        return scene.prose.dictionary("{" + ",\n ".join(entries) + "}")

    context = scene.fit(write, _FEWEST)
    start = context.index(target)
    return context, ((start, start + len(target)),), scene.prose.ask_entry(key, value)


def _entry(key: str, value: str) -> str:
    return f'"{key}": "{value}"'


def _draw_uuid(rng: random.Random) -> str:
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
    "niah_multiquery": Task(Needles(keys=4, num_queried=4)),
    **{f"niah_turn_{number}": Task(Turn(number), plain=True) for number in (1, 2, 4, 8)},
    "passkey": Task(passkey, SHORT),
    "kv_retrieval": Task(key_value, LONG // 2),
}
TRAINED = {
    "niah_single": Task(Needles()),
    "niah_multikey": Task(Needles(keys=16)),
    "niah_multivalue": Task(Needles(keys=2, values=2)),
    "niah_multiquery": Task(Needles(keys=8, num_queried=2)),
}
