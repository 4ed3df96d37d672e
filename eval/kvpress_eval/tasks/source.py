# SPDX-License-Identifier: Apache-2.0
"""Interface between runs and tasks: the settings that tasks read, and the samples that they return."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvpress_eval.tasks.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TaskSettings(Protocol):
    """Settings of a run that tasks read; `RunConfig` has them."""

    tasks: tuple[str, ...]
    """Names of the tasks."""
    lengths: tuple[int, ...]
    """Maximum tokens of a context, or of a prompt for published tasks."""
    samples: int
    """Samples per task and length."""
    seed: int
    """Random seed."""
    filler: str
    """`noise`, `repeat`, or the name or path of a real text."""
    depth: float | None
    """Fraction of the context before the answer; None for a random one."""
    depths: tuple[float, ...]
    """Several depths, used instead of `depth` if there are any."""
    data_dir: Path | None
    """Folder with published data; None to read it from the hub."""
    max_new_tokens: int | None
    """Maximum tokens of an answer; None for the number of the task."""

    @property
    def wording(self) -> str:
        """Name of the language."""

    @property
    def model_fields_set(self) -> set[str]:
        """Names of the fields that the user set."""


@dataclass(frozen=True, eq=False)
class Source:
    """Samples of one task at one length."""

    task: str
    """Name of the task."""
    length: int
    """Maximum tokens of a context; 0 if the task decides its length."""
    ids: Sequence[str]
    """Identifiers of the samples, available before the samples are made."""
    make: Callable[[PreTrainedTokenizerBase], list[Sample]]
    """Makes the samples for a tokenizer."""
    identity: Mapping[str, Any]
    """All that the samples depend on, besides task and length; results with another identity are not reused."""
    max_new_tokens: int
    """Maximum tokens of an answer."""


@dataclass(frozen=True)
class Kind:
    """Tasks of one kind."""

    names: Collection[str]
    """Names of the tasks."""
    expand: Callable[[Sequence[str], TaskSettings], list[Source]]
    """Returns the sources of some names; it reads the data, so that a missing file raises before the run."""
    prefix: str | None = None
    """Prefix of names that cannot be listed, such as `file:`."""
