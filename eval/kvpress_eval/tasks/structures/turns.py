# SPDX-License-Identifier: Apache-2.0
"""A conversation about one context: several questions, one of which counts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpress_eval.tasks.languages.base import Fact
from kvpress_eval.tasks.sample import Query, Spans
from kvpress_eval.tasks.scene import Scene, Task


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


TASKS = {f"niah_turn_{number}": Task(Turn(number), plain=True) for number in (1, 2, 4, 8)}
