"""Variable tracking: chains of assignments, one of which has to be followed."""

from __future__ import annotations

from itertools import pairwise

from kvpress_eval.tasks.sample import Query, Spans
from kvpress_eval.tasks.scene import Scene

CHAINS = 2
HOPS = 2


def variable_tracking(scene: Scene) -> tuple[str, Spans, Query]:
    """Two chains of a value and two hops; the question is about the first chain."""
    rng, language = scene.rng, scene.language
    names = language.draw_variables(rng, CHAINS * (HOPS + 1))
    chains = [names[start : start + HOPS + 1] for start in range(0, len(names), HOPS + 1)]
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
