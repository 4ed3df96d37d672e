# SPDX-License-Identifier: Apache-2.0
"""Plain English, for any instruction model."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

from kvpress.data.reference.words import ADJ, KEYS
from kvpress_eval.tasks.languages.base import Fact, Language
from kvpress_eval.tasks.sample import Query

WHO = (
    "the harbour master", "a retired teacher", "the youngest gardener", "our neighbour", "the night porter",
    "a travelling musician", "the village baker", "an old friend of the family", "the ferry captain",
    "a visiting engineer", "the museum guide", "a student from the coast", "the shop owner", "the postman",
    "a quiet librarian", "the railway inspector", "a young carpenter", "the head cook",
    "the lighthouse keeper", "a painter from the hills", "the bus driver", "a group of hikers",
    "the town clerk", "a patient nurse",
)  # fmt: skip
ACTION = (
    "repaired the wooden gate", "wrote a long letter", "carried the crates upstairs",
    "counted the empty chairs", "swept the front steps", "looked for a missing umbrella",
    "watered the tomatoes", "read the evening paper", "told a story about the sea",
    "painted the fence green", "opened the heavy shutters", "sorted the old maps",
    "waited for the last train", "sharpened the garden tools", "polished the brass lamps",
    "fed the stray cats", "borrowed a bicycle", "hung the washing out to dry", "walked along the canal",
    "lit a small fire", "baked two loaves of bread", "mended a torn coat", "closed the windows",
    "listened to the radio",
)  # fmt: skip
WHEN = (
    "before the rain started", "while the street was still quiet", "after the market had closed",
    "without saying a word", "as the fog lifted", "until it was too dark to see", "with great care",
    "during the long afternoon", "once the guests had left", "although nobody had asked",
    "just before sunrise", "in the shade of the chestnut tree", "while the kettle boiled",
    "for the third time that week", "because the weather was mild", "in no particular hurry",
)  # fmt: skip
OPENING = ("", "", "Later that day, ", "On most mornings, ", "As usual, ", "That spring, ", "To be fair, ")


class EnglishLanguage(Language):
    """Plain English sentences; values have seven digits, so that a model cannot guess them."""

    name = "english"
    attributes: Sequence[str] = ("access code", "serial number", "booking number", "account number")
    countable_attributes: Sequence[str] = attributes
    words: Sequence[str] = KEYS
    refrain: Sequence[str] = (" The clock on the wall ticks.", " The tea is getting cold.", " Nobody is in a hurry.")
    value_form = " Variable {} is set to {}."
    variable_form = " Variable {} is set to the value of variable {}."
    list_form = " Here is a list of words: {}."
    list_separator = ", "

    def draw_keys(self, rng: random.Random, count: int) -> list[str]:
        """Return `count` different things, such as "the golden lantern"."""
        pairs = rng.sample(range(len(ADJ) * len(KEYS)), count)
        return [f"the {ADJ[pair % len(ADJ)]} {KEYS[pair // len(ADJ)]}" for pair in pairs]

    def draw_variables(self, rng: random.Random, count: int) -> list[str]:
        """Return `count` different names of five capital letters."""
        names: dict[str, None] = {}
        while len(names) < count:
            names["".join(rng.choices(string.ascii_uppercase, k=5))] = None
        return list(names)

    def draw_value(self, rng: random.Random) -> str:
        """Return seven digits."""
        return str(rng.randrange(1_000_000, 10_000_000))

    def filler(self, rng: random.Random) -> str:
        text = f"{rng.choice(OPENING)}{rng.choice(WHO)} {rng.choice(ACTION)} {rng.choice(WHEN)}."
        return f" {text[0].upper()}{text[1:]}"

    def ask_facts(self, facts: Sequence[Fact]) -> Query:
        subject = " and ".join(f"the {fact.attribute} for {fact.key}" for fact in facts)
        question = f"\nAccording to the text above, what is {subject}?"
        prefix = f"The {facts[0].attribute} for {facts[0].key} is"
        return Query(question, prefix, tuple(fact.value for fact in facts), "contains")

    def ask_all_values(self, facts: Sequence[Fact]) -> Query:
        subject = f"{facts[0].attribute}s for {facts[0].key}"
        question = f"\nAccording to the text above, what are all the {subject}?"
        answers = tuple(fact.value for fact in facts)
        return Query(question, f"The {subject} are", answers, "contains")

    def ask_chain(self, variables: Sequence[str], value: str) -> Query:
        question = f"\nWhich variables hold the value {value}, directly or through other variables?"
        prefix = f"The variables that hold the value {value} are"
        return Query(question, prefix, tuple(variables), "contains")

    def ask_most_common(self, words: Sequence[str]) -> Query:
        question = f"\nWhat are the {len(words)} most common words in the list above?"
        prefix = f"The {len(words)} most common words in the list are"
        return Query(question, prefix, tuple(words), "contains")

    def draw_words(self, rng: random.Random, count: int) -> list[str]:
        """Return `count` different words; if there are too few, pairs such as "lantern-tiger", of which there are 90,000."""
        if count <= len(self.words):
            return rng.sample(self.words, count)
        pairs = rng.sample(range(len(self.words) ** 2), count)
        return [f"{self.words[pair // len(self.words)]}-{self.words[pair % len(self.words)]}" for pair in pairs]

    def code(self, words: Sequence[str]) -> str:
        """Return a context of coded words."""
        return f" Here is a text in code: {' '.join(words)}"

    def ask_most_frequent(self, words: Sequence[str]) -> Query:
        """Return the question for the most frequent coded words."""
        question = f"\nWhich {len(words)} coded words occur most often in the text above? The dots are not words."
        prefix = f"The {len(words)} most frequent coded words are"
        return Query(question, prefix, tuple(words), "contains")

    def passage(self, text: str) -> str:
        """Return a passage with its heading."""
        return f"\n\nPassage:\n{text.strip()}"

    def ask_question(self, question: str, answers: Sequence[str]) -> Query:
        """Return a question about passages."""
        text = f"\n\nAnswer in a few words what the passages above say. Question: {question}"
        return Query(text, "Answer:", tuple(answers), "any")

    def tell_passkey(self, value: str) -> str:
        """Return the sentences that state the pass key, twice."""
        return f" The pass key is {value}. Keep it in mind: {value} is the pass key."

    def ask_passkey(self, value: str) -> Query:
        """Return the question for the pass key."""
        return Query("\nWhat is the pass key?", "The pass key is", (value,), "contains")

    def dictionary(self, text: str) -> str:
        """Return a context of a JSON dictionary."""
        return f" Here is a JSON object:\n{text}"

    def ask_entry(self, key: str, value: str) -> Query:
        """Return the question for the value of a key."""
        question = f'\nWhat is the value of the key "{key}" in the JSON object above?'
        return Query(question, f'The value of "{key}" is', (value,), "contains")
