# SPDX-License-Identifier: Apache-2.0
"""Contexts with several facts, and a question for each of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvpress_eval.common.errors import ConfigError
from kvpress_eval.tasks.filler import Filler
from kvpress_eval.tasks.languages import Fact, Language
from kvpress_eval.tasks.sample import Query, Sample
from kvpress_eval.tasks.scene import Scene

DIGITS = "digits"
MOST_FACTS = 12
_WORDS = 3
"""Words of a password."""

Wording = Callable[[Scene, str], tuple[str, Query]]
"""Draws the value of a key; returns the sentence that states it, and the question for it."""


@dataclass(frozen=True)
class FactContext:
    """Context with several facts."""

    id: str
    """Identifier, unique in a measurement."""
    samples: tuple[Sample, ...]
    """One question for each fact; all have the same context."""
    kinds: tuple[str, ...]
    """Kind of value of each question."""

    @property
    def length(self) -> int:
        """Requested tokens of the context."""
        return self.samples[0].length

    @property
    def depths(self) -> list[float]:
        """Fraction of the context before each fact."""
        return [sample.spans[0][0] / len(sample.context) for sample in self.samples]


@dataclass(frozen=True)
class FactSettings:
    """Settings of the facts in a context."""

    count: int = 6
    """Facts of a context."""
    values: tuple[str, ...] = (DIGITS,)
    """Kinds of values, which the facts take in turn."""

    def check(self, language: str) -> None:
        """Check the settings.

        Raises:
            ConfigError: the number is out of range, or a kind is unknown or has no words in the language.
        """
        if not 1 <= self.count <= MOST_FACTS:
            raise ConfigError(f"facts must be from 1 to {MOST_FACTS}, got {self.count}")
        if unknown := [kind for kind in self.values if kind not in KINDS] or not self.values:
            raise ConfigError(f"values must be one or several of {', '.join(KINDS)}, got {unknown or 'none'}")
        if language == "reference" and self.values != (DIGITS,):
            raise ConfigError(
                f"the reference model was trained on values of digits only: give values {DIGITS}, or another model"
            )


def make_contexts(
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    count: int,
    settings: FactSettings,
    *,
    language: Language,
    filler: Filler,
    seed: int = 0,
) -> list[FactContext]:
    """Return `count` contexts of at most `length` tokens; context `i` does not depend on `count`.

    Raises:
        ConfigError: `length` is too short for the facts.
    """
    contexts = []
    for index in range(count):
        name = f"{length}-{seed}-{index}"
        rng = random.Random(f"recall-{language.name}-{name}")  # noqa: S311  # reproducible, not secret
        scene = Scene(rng, language, tokenizer, length, filler=filler, seed=seed, index=index)
        try:
            contexts.append(_make_context(name, scene, settings))
        except ValueError as error:
            raise ConfigError(f"{error}; give a longer one, or fewer than {settings.count} facts") from error
    return contexts


def _make_context(name: str, scene: Scene, settings: FactSettings) -> FactContext:
    keys = scene.language.draw_keys(scene.rng, settings.count)
    kinds = tuple(settings.values[number % len(settings.values)] for number in range(settings.count))
    facts = [KINDS[kind](scene, key) for kind, key in zip(kinds, keys, strict=True)]
    text, _ = scene.weave([[statement] for statement, _ in facts])
    samples = []
    for number, (statement, query) in enumerate(facts):
        start = text.index(statement)
        span = (start, start + len(statement))
        samples.append(Sample(f"{name}-{number}", "recall", scene.length, text, query, (span,)))
    return FactContext(name, tuple(samples), kinds)


def _digits(scene: Scene, key: str) -> tuple[str, Query]:
    language = scene.language
    fact = Fact(scene.rng.choice(language.attributes), key, language.draw_value(scene.rng))
    return language.state(fact), language.ask_facts([fact])


def _words(scene: Scene, key: str) -> tuple[str, Query]:
    value = " ".join(scene.prose.draw_words(scene.rng, _WORDS))
    return _fact(f"the password for {key}", "is", value)


def _quote(scene: Scene, key: str) -> tuple[str, Query]:
    value = f'"{scene.language.filler(scene.rng).strip()}"'
    return _fact(f"the note on {key}", "reads:", value, end="")


def _json(scene: Scene, key: str) -> tuple[str, Query]:
    """Draw an object; the answer is its values with the keys between them, and follows the first key."""
    rng = scene.rng
    values = {
        "port": rng.randrange(1000, 10_000),
        "mode": rng.choice(scene.prose.words),
        "limit": rng.randrange(10, 100),
    }
    opening, answer = json.dumps(values).removesuffix("}").split(" ", 1)
    return _fact(f"the settings object for {key}", "is", answer, opening=f" {opening}", end="}.")


def _code(scene: Scene, key: str) -> tuple[str, Query]:
    constant = key.removeprefix("the ").replace(" ", "_").upper()
    return _fact(f"the constant {constant}", "=", f"0x{scene.rng.getrandbits(24):06x}")


def _fact(subject: str, verb: str, value: str, *, opening: str = "", end: str = ".") -> tuple[str, Query]:
    """Return the sentence of a fact, and the question for its value; `opening` comes before the value in both."""
    prefix = f"{subject[0].upper()}{subject[1:]} {verb}{opening}"
    query = Query(f"\nAccording to the text above, what is {subject}?", prefix, (value,), "contains")
    return f" {prefix} {value}{end}", query


KINDS: dict[str, Wording] = {DIGITS: _digits, "words": _words, "quote": _quote, "json": _json, "code": _code}
"""Kinds of values: numbers, words, a sentence to quote, key-value pairs, hexadecimal constants."""


def describe(contexts: Sequence[FactContext]) -> list[dict[str, object]]:
    """Return the questions of the contexts as plain data."""
    return [
        {
            "context": context.id,
            "kinds": list(context.kinds),
            "depths": [round(depth, 3) for depth in context.depths],
            "answers": [sample.query.answers[0] for sample in context.samples],
        }
        for context in contexts
    ]
