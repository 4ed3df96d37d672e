# SPDX-License-Identifier: Apache-2.0
"""Conversation about one context: several questions, of which the last is scored."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpress_eval.tasks.languages.base import Fact
from kvpress_eval.tasks.sample import Query, Spans
from kvpress_eval.tasks.scene import Scene, Task


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


TASKS = {f"niah_turn_{number}": Task(Turn(number), plain=True) for number in (1, 2, 4, 8)}
