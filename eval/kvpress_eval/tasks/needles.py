"""Needles in a haystack: facts hidden among filler, some of them asked for."""

from __future__ import annotations

from kvpress_eval.languages.base import Fact
from kvpress_eval.tasks.sample import Query, Spans
from kvpress_eval.tasks.scene import Scene

KEYS = 16
"""Facts in the multi-key task, where room allows."""
QUERY_KEYS, QUERIES = 8, 2
"""Facts in the multi-query task, and how many of them one question asks for."""
VALUE_KEYS, VALUES = 2, 2
"""Keys in the multi-value task, and how many values each of them has."""


def single(scene: Scene) -> tuple[str, Spans, Query]:
    """One fact; the question asks for it."""
    return _facts(scene, count=1, asked=1)


def multikey(scene: Scene) -> tuple[str, Spans, Query]:
    """Many facts about different keys; the question asks for one of them."""
    return _facts(scene, count=KEYS, asked=1)


def multiquery(scene: Scene) -> tuple[str, Spans, Query]:
    """Several facts about different keys; one question asks for two of them."""
    return _facts(scene, count=QUERY_KEYS, asked=QUERIES)


def multivalue(scene: Scene) -> tuple[str, Spans, Query]:
    """The same key is given several values; the question asks for all of them."""
    rng, language = scene.rng, scene.language
    groups = [
        [Fact(attribute, key, language.draw_value(rng)) for _ in range(VALUES)]
        for key in language.draw_keys(rng, VALUE_KEYS)
        for attribute in [rng.choice(language.countable_attributes)]
    ]
    chains = [[language.state(fact) for fact in group] for group in groups]
    context, spans = scene.weave(chains[:1], chains[1:])
    return context, spans, language.ask_all_values(groups[0])


def _facts(scene: Scene, count: int, asked: int) -> tuple[str, Spans, Query]:
    rng, language = scene.rng, scene.language
    facts = [
        Fact(rng.choice(language.attributes), key, language.draw_value(rng)) for key in language.draw_keys(rng, count)
    ]
    facts = facts[: scene.capacity(language.state(facts[0]), least=asked, most=count)]
    chains = [[language.state(fact)] for fact in facts]
    context, spans = scene.weave(chains[:asked], chains[asked:])
    return context, spans, language.ask_facts(facts[:asked])
