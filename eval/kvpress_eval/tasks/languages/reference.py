# SPDX-License-Identifier: Apache-2.0
"""Language of the bundled reference model: the small subset of English that it was trained on."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvpress.data.reference.words import ADJ, ADV, ATTR, KEYS, NOUN, PREP, VERB
from kvpress_eval.tasks.languages.base import Fact, Language
from kvpress_eval.tasks.sample import Query


class ReferenceLanguage(Language):
    """Words and sentence forms of the training data; accuracy drops with any other word."""

    name = "reference"
    attributes: Sequence[str] = ATTR
    countable_attributes: Sequence[str] = ("code", "number")
    words: Sequence[str] = KEYS
    refrain: Sequence[str] = (f" The {ADJ[0]} {NOUN[0]} {VERB[0]} {PREP[0]} the {NOUN[1]}.",)
    value_form = " Let {} be {}."
    variable_form = " Let {} be {}."
    list_form = " List: {}."
    list_separator = " "

    def draw_keys(self, rng: random.Random, count: int) -> list[str]:
        """Return `count` different nouns."""
        return rng.sample(KEYS, count)

    def draw_variables(self, rng: random.Random, count: int) -> list[str]:
        """Return `count` different nouns, which are also names of variables here."""
        return rng.sample(KEYS, count)

    def draw_value(self, rng: random.Random) -> str:
        """Return four digits, which are two tokens."""
        return f"{rng.randrange(10_000):04d}"

    def filler(self, rng: random.Random) -> str:
        """Return a sentence in one of five forms; one noun in ten is drawn from the keys."""
        form = rng.random()
        verb = rng.choice(VERB)
        first, second = (rng.choice(KEYS if rng.random() < 0.1 else NOUN) for _ in range(2))
        if form < 0.35:
            return f" The {rng.choice(ADJ)} {first} {verb} {rng.choice(PREP)} the {second}."
        if form < 0.6:
            return f" The {first} {verb} {rng.choice(PREP)} the {rng.choice(ADJ)} {second}."
        if form < 0.8:
            return f" A {first} and a {second} {verb} {rng.choice(ADV)}."
        if form < 0.9:
            return f" In the {first} the {second} {verb}."
        return f" The {first} {verb} {rng.choice(ADV)}."

    def ask_facts(self, facts: Sequence[Fact]) -> Query:
        """Return the question for one or more facts; the answer has every fact after the first as a sentence."""
        first, *later = facts
        subject = " and ".join(f"the {fact.attribute} for {fact.key}" for fact in facts)
        answer = first.value + "".join(f".{self.state(fact).removesuffix('.')}" for fact in later)
        prefix = f"The {first.attribute} for {first.key} is"
        return Query(f"\nWhat is {subject}?", prefix, (answer,), "prefix")

    def ask_all_values(self, facts: Sequence[Fact]) -> Query:
        """Return the question for all values; the answer has them in order of appearance."""
        subject = f"{facts[0].attribute}s for {facts[0].key}"
        answer = " and ".join(fact.value for fact in facts)
        return Query(f"\nWhat are all the {subject}?", f"The {subject} are", (answer,), "prefix")

    def ask_chain(self, variables: Sequence[str], value: str) -> Query:
        """Return the question for the trace from the last variable back to the value."""
        *earlier, last = variables
        answer = " be ".join([*reversed(earlier), value])
        return Query(f"\nTrace {last}.", f"Let {last} be", (answer,), "prefix")

    def ask_most_common(self, words: Sequence[str]) -> Query:
        """Return the question for the most common word; the language has no form for several."""
        (word,) = words
        return Query("\nWhat is the most common word?", "The most common word is", (word,), "prefix")
