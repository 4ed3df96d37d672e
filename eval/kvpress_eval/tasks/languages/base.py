# SPDX-License-Identifier: Apache-2.0
"""What a language says: how the facts, questions and filler of a task are worded.

Sentences start with their leading space, so that a context is their plain concatenation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpress_eval.tasks.sample import Query


@dataclass(frozen=True)
class Fact:
    """The `attribute` of `key` is `value`."""

    attribute: str
    key: str
    value: str


class Language(Protocol):
    """Words and sentence forms; a task decides which facts there are, a language how they read.

    `refrain` are sentences that may be repeated as filler. `value_form` gives a variable a value, `variable_form` that of
    another variable; `list_form` is a context that is nothing but words, with `list_separator` between them.
    """

    name: str
    attributes: Sequence[str]
    countable_attributes: Sequence[str]
    words: Sequence[str]
    refrain: Sequence[str]
    value_form: str
    variable_form: str
    list_form: str
    list_separator: str

    def draw_keys(self, rng: random.Random, count: int) -> list[str]:
        """Return `count` different things that facts can be about."""

    def draw_variables(self, rng: random.Random, count: int) -> list[str]:
        """Return `count` different variable names."""

    def draw_value(self, rng: random.Random) -> str:
        """Return a number that no filler sentence contains."""

    def filler(self, rng: random.Random) -> str:
        """Return a sentence that no question is about."""

    def state(self, fact: Fact) -> str:
        """Return the sentence that tells a fact."""
        return f" The {fact.attribute} for {fact.key} is {fact.value}."

    def assign_value(self, variable: str, value: str) -> str:
        """Return the sentence that gives a variable a value."""
        return self.value_form.format(variable, value)

    def assign_variable(self, variable: str, source: str) -> str:
        """Return the sentence that gives a variable the value of another one."""
        return self.variable_form.format(variable, source)

    def list_words(self, words: Sequence[str]) -> str:
        """Return a context that is nothing but these words."""
        return self.list_form.format(self.list_separator.join(words))

    def ask_facts(self, facts: Sequence[Fact]) -> Query:
        """Ask for the value of each fact."""

    def ask_all_values(self, facts: Sequence[Fact]) -> Query:
        """Ask for every value of one key and attribute; `facts` are in order of appearance."""

    def ask_chain(self, variables: Sequence[str], value: str) -> Query:
        """Ask about a chain of assignments that starts with `value`; each variable takes the one before."""

    def ask_most_common(self, words: Sequence[str]) -> Query:
        """Ask for the words that occur most often in a list."""
