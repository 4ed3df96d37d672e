# SPDX-License-Identifier: Apache-2.0
"""What a run asks of its tasks, and what a task offers to a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from kvpress_eval.tasks.sample import Sample


class Request(Protocol):
    """What tasks are told of a run; its configuration says all of this."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    seed: int
    filler: str
    depth: float | None
    depths: tuple[float, ...]
    data_dir: Path | None
    max_new_tokens: int | None

    @property
    def wording(self) -> str:
        """The name of the language."""

    @property
    def model_fields_set(self) -> set[str]:
        """The fields that the user gave."""


@dataclass(frozen=True, eq=False)
class Source:
    """One task at one length, for one run.

    `ids` name the samples without making them; `make` makes them for a tokenizer. `identity` decides the samples, with the
    task and the length, which is 0 where a task says itself how long it is. `max_new_tokens` is the room for an answer.
    """

    task: str
    length: int
    ids: Sequence[str]
    make: Callable[[PreTrainedTokenizerBase], list[Sample]]
    identity: Mapping[str, Any]
    max_new_tokens: int


@dataclass(frozen=True)
class Kind:
    """Tasks of one kind, by name; `prefix` is that of names that cannot be listed.

    `expand` returns what some of the names stand for; data is read, so that a missing file is known early.
    """

    names: Collection[str]
    expand: Callable[[Sequence[str], Request], list[Source]]
    prefix: str | None = None
