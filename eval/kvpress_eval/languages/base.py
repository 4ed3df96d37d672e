"""What a language says: how the facts, questions and filler of a task are worded.

Sentences start with their leading space, so that a context is their plain concatenation.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvpress_eval.tasks.sample import Query


@dataclass(frozen=True)
class Fact:
    """The `attribute` of `key` is `value`."""

    attribute: str
    key: str
    value: str


class Language(Protocol):
    """Words and sentence forms; a task decides which facts there are, a language how they read.

    `refrain` are sentences that may be repeated as filler.
    """

    name: str
    attributes: Sequence[str]
    countable_attributes: Sequence[str]
    words: Sequence[str]
    refrain: Sequence[str]

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

    def assign_value(self, variable: str, value: str) -> str:
        """Return the sentence that gives a variable a value."""

    def assign_variable(self, variable: str, source: str) -> str:
        """Return the sentence that gives a variable the value of another one."""

    def list_words(self, words: Sequence[str]) -> str:
        """Return a context that is nothing but these words."""

    def ask_facts(self, facts: Sequence[Fact]) -> Query:
        """Ask for the value of each fact."""

    def ask_all_values(self, facts: Sequence[Fact]) -> Query:
        """Ask for every value of one key and attribute; `facts` are in order of appearance."""

    def ask_chain(self, variables: Sequence[str], value: str) -> Query:
        """Ask about a chain of assignments that starts with `value`; each variable takes the one before."""

    def ask_most_common(self, words: Sequence[str]) -> Query:
        """Ask for the words that occur most often in a list."""


class Prose(Language, Protocol):
    """A language with words for every task."""

    def draw_words(self, rng: random.Random, count: int) -> list[str]:
        """Return `count` different words for a list."""

    def code(self, words: Sequence[str]) -> str:
        """Return a context that is a text of these coded words."""

    def ask_most_frequent(self, words: Sequence[str]) -> Query:
        """Ask for the coded words that occur most often, apart from the dots."""

    def passage(self, text: str) -> str:
        """Return a passage of a context that is nothing but passages."""

    def ask_question(self, question: str, answers: Sequence[str]) -> Query:
        """Ask a question about passages; one of the answers is enough."""

    def tell_passkey(self, value: str) -> str:
        """Return the sentences that tell a pass key."""

    def ask_passkey(self, value: str) -> Query:
        """Ask for the pass key."""

    def dictionary(self, text: str) -> str:
        """Return a context that is this JSON dictionary."""

    def ask_entry(self, key: str, value: str) -> Query:
        """Ask for the value of a key of a dictionary."""
