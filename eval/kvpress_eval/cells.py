"""The cells of a run: a press on a task at a length, named by the hash of all that decides the result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

import kvpress
from kvpress_eval.config import RunConfig
from kvpress_eval.errors import ConfigError
from kvpress_eval.languages import LANGUAGES
from kvpress_eval.tasks import Sample, generate, sample_id
from kvpress_eval.tasks.files import PREFIX, TaskFile, read_file, split_source

SCHEMA = 1
"""Raised when the same configuration starts to mean something else, so that old rows are not mixed in."""


@dataclass(frozen=True)
class TaskLength:
    """One task at one length, generated or from a file."""

    task: str
    length: int
    file: TaskFile | None = None

    def sample_ids(self, config: RunConfig) -> list[str]:
        """Return the names of the samples, without making them."""
        if self.file:
            return [sample.id for sample in self.file.select(self.task, self.length)[: config.samples]]
        return [sample_id(self.task, self.length, config.seed, index) for index in range(config.samples)]

    def samples(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        """Return the samples of this task that the run asks for."""
        if self.file:
            return self.file.select(self.task, self.length)[: config.samples]
        return generate(
            self.task,
            tokenizer,
            self.length,
            config.samples,
            language=LANGUAGES[config.wording],
            seed=config.seed,
            depth=config.depth,
        )


@dataclass(frozen=True)
class Cell:
    """A press on a task; `spec` is everything that decides the result, `id` its hash."""

    press: str
    source: TaskLength
    spec: Mapping[str, Any]
    id: str

    @property
    def label(self) -> str:
        """How progress lines and error messages call the cell."""
        return f"{self.press} on {self.source.task} at {self.source.length}"


def expand_tasks(config: RunConfig) -> list[TaskLength]:
    """Return every task and length of a run; files are read, so that a missing one is known early."""
    sources: list[TaskLength] = []
    for name in config.tasks:
        if not name.startswith(PREFIX):
            sources += [TaskLength(name, length) for length in config.lengths]
            continue
        path, chosen = split_source(name)
        file = read_file(path)
        found = [
            TaskLength(task, length, file)
            for task in file.tasks(chosen)
            for length in config.lengths
            if file.select(task, length)
        ]
        if not found:
            lengths = ", ".join(map(str, sorted({sample.length for sample in file.samples})))
            raise ConfigError(f"{path} has no rows of the lengths asked for; it has {lengths or 'none'}")
        sources += found
    return sources


def make_cells(
    config: RunConfig, sources: Sequence[TaskLength], fingerprint: str, device: str, dtype: str
) -> list[Cell]:
    """Return the cells of a run, press by press; the last three arguments say which weights ran how."""
    shared = {
        "schema": SCHEMA,
        "kvpress": kvpress.__version__,
        "model": config.model,
        "weights": fingerprint,
        "device": device,
        "dtype": dtype,
        "question_aware": config.question_aware,
        "batch_size": config.batch_size,
        "max_new_tokens": config.max_new_tokens,
        "max_seconds_per_sample": config.max_seconds_per_sample,
    }
    generated = {"seed": config.seed, "language": config.wording, "depth": config.depth}
    cells = []
    for press in config.presses:
        for source in sources:
            origin = {"file": source.file.sha256} if source.file else generated
            spec = {**shared, **origin, "press": press, "task": source.task, "length": source.length}
            cells.append(Cell(press, source, spec, hash_json(spec)[:16]))
    return cells


def hash_json(value: object) -> str:
    """Return the SHA-256 of a value's canonical JSON: sorted keys, no spaces, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
