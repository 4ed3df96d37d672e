# SPDX-License-Identifier: Apache-2.0
"""Variable tracking: follow one of several chains of assignments."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from kvpress_eval.tasks.sample import Query, Spans
from kvpress_eval.tasks.scene import LONG, Scene, Task


@dataclass(frozen=True)
class VariableTracking:
    """Chains of assignments from variable to variable; the question is about the first chain."""

    chains: int = 1
    """Number of chains."""
    hops: int = 4
    """Assignments of a chain after its value."""

    def __call__(self, scene: Scene) -> tuple[str, Spans, Query]:
        """Build a context."""
        rng, language = scene.rng, scene.language
        length = self.hops + 1
        names = language.draw_variables(rng, self.chains * length)
        chains = [names[start : start + length] for start in range(0, len(names), length)]
        values = [language.draw_value(rng) for _ in chains]
        sentences = [
            [
                language.assign_value(chain[0], value),
                *(language.assign_variable(name, source) for source, name in pairwise(chain)),
            ]
            for chain, value in zip(chains, values, strict=True)
        ]
        context, spans = scene.weave(sentences[:1], sentences[1:])
        return context, spans, language.ask_chain(chains[0], values[0])


TASKS = {"vt": Task(VariableTracking(), LONG // 2)}
TRAINED = {"vt": Task(VariableTracking(chains=2, hops=2))}
