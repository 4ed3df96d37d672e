# SPDX-License-Identifier: Apache-2.0
"""Interface of a language: the wording of facts, questions and filler.

Sentences begin with a space, so that a context is their concatenation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpress_eval.tasks.sample import Query


@dataclass(frozen=True)
class Fact:
    """Statement that the `attribute` of `key` is `value`."""

    attribute: str
    """Property, such as "code"."""
    key: str
    """Thing that has the property."""
    value: str
    """Value of the property."""


class Language(Protocol):
    """Words and sentence forms; tasks decide the facts, a language words them."""

    name: str
    """Name of the language."""
    attributes: Sequence[str]
    """Attributes of facts."""
    countable_attributes: Sequence[str]
    """Attributes that may have several values and take a plural."""
    words: Sequence[str]
    """Words of lists."""
    refrain: Sequence[str]
    """Sentences that are repeated as filler."""
    value_form: str
    """Form that assigns a value to a variable."""
    variable_form: str
    """Form that assigns the value of another variable to a variable."""
    list_form: str
    """Form of a context that is a list of words."""
    list_separator: str
    """Text between the words of a list."""

    def draw_keys(self, rng: random.Random, count: int) -> list[str]:
        """Return `count` different things for facts."""

    def draw_variables(self, rng: random.Random, count: int) -> list[str]:
        """Return `count` different variable names."""

    def draw_value(self, rng: random.Random) -> str:
        """Return a random number as text; no filler sentence contains it."""

    def filler(self, rng: random.Random) -> str:
        """Return a sentence that no question refers to."""

    def state(self, fact: Fact) -> str:
        """Return a fact as a sentence."""
        return f" The {fact.attribute} for {fact.key} is {fact.value}."

    def assign_value(self, variable: str, value: str) -> str:
        """Return the sentence that assigns a value to a variable."""
        return self.value_form.format(variable, value)

    def assign_variable(self, variable: str, source: str) -> str:
        """Return the sentence that assigns the value of `source` to a variable."""
        return self.variable_form.format(variable, source)

    def list_words(self, words: Sequence[str]) -> str:
        """Return a context that is a list of words."""
        return self.list_form.format(self.list_separator.join(words))

    def ask_facts(self, facts: Sequence[Fact]) -> Query:
        """Return the question for the value of each fact."""

    def ask_all_values(self, facts: Sequence[Fact]) -> Query:
        """Return the question for every value of one key and attribute; `facts` are in order of appearance."""

    def ask_chain(self, variables: Sequence[str], value: str) -> Query:
        """Return the question about a chain of assignments from `value` on; each variable takes the value of the one before."""

    def ask_most_common(self, words: Sequence[str]) -> Query:
        """Return the question for the most common words of a list."""
