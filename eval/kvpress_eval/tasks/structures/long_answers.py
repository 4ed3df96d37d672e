# SPDX-License-Identifier: Apache-2.0
"""Long answers with one line per fact, which measure a press during decoding.

After LongGenBench (Wu et al., 2024, arXiv:2409.02076), whose answers have a part for each of many instructions. There a model
judges each part; here each line has one right value.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvpress_eval.tasks.languages.base import Fact
from kvpress_eval.tasks.sample import Query, Spans
from kvpress_eval.tasks.scene import Scene, Task

_FEWEST, _MOST, _ROOM = 4, 64, 1536
"""Minimum and maximum lines of an answer, and the tokens that the maximum needs."""


def long_answer(scene: Scene) -> tuple[str, Spans, Query]:
    """Build a context with facts about many things; the question lists the things, and the answer has a numbered line each."""
    language, rng = scene.language, scene.rng
    attribute = rng.choice(language.countable_attributes)
    facts = [Fact(attribute, key, language.draw_value(rng)) for key in language.draw_keys(rng, _MOST)]
    facts = facts[: scene.capacity(language.state(facts[0]), _FEWEST, _MOST)]
    context, spans = scene.weave([[language.state(fact)] for fact in facts])
    listed = ", ".join(f"{number}. {fact.key}" for number, fact in enumerate(facts, start=1))
    question = (
        f"\nFor each of these write one line with its number, its name and its {attribute} from the text above, in this "
        f"order: {listed}"
    )
    return context, spans, Query(question, "", tuple(fact.value for fact in facts), lines_right)


def lines_right(text: str, answers: Sequence[str]) -> float:
    """Return the share of numbered lines with the right value; of several lines with the same number the first counts."""
    lines: dict[int, str] = {}
    for line in text.splitlines():
        numbered = re.match(r"\W*(\d{1,4})\b(.*)", line)
        if numbered:
            lines.setdefault(int(numbered[1]), numbered[2])
    right = [
        re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", lines.get(number, "")) is not None
        for number, answer in enumerate(answers, start=1)
    ]
    return sum(right) / len(right)


TASKS = {"long_answer": Task(long_answer, _ROOM, placed=False)}
