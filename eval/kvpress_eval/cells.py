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
from kvpress_eval.gsm8k import NAME as GSM8K
from kvpress_eval.gsm8k import Gsm8kTask, read_task
from kvpress_eval.languages import LANGUAGES
from kvpress_eval.longbench.tasks import LongBenchTask, expand, is_longbench
from kvpress_eval.tasks import SOURCES, UNPLACED, Sample, answer_room, generate, sample_id
from kvpress_eval.tasks.files import PREFIX, TaskFile, read_file, split_source
from kvpress_eval.tasks.filler import NOISE, Filler, read_filler
from kvpress_eval.tasks.questions import QuestionSet, read_questions

SCHEMA = 3
"""Raised when the same configuration starts to mean something else, so that old rows are not mixed in."""


@dataclass(frozen=True)
class TaskLength:
    """One task at one length and depth, generated or from a file."""

    task: str
    length: int
    file: TaskFile | None = None
    depth: float | None = None
    filler: Filler = NOISE
    questions: QuestionSet | None = None

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
            depth=self.depth,
            filler=self.filler,
            questions=self.questions,
        )

    def identity(self, config: RunConfig) -> dict[str, Any]:
        """Return what decides the samples, besides task and length."""
        if self.file:
            return {"file": self.file.sha256}
        made = {"seed": config.seed, "language": config.wording, "depth": self.depth, "filler": self.filler.name}
        return {**made, "questions": self.questions.origin} if self.questions else made

    def max_new_tokens(self, config: RunConfig) -> int:
        """Return the length of the longest answer."""
        return config.max_new_tokens or answer_room(self.task, config.wording)


Source = TaskLength | LongBenchTask | Gsm8kTask


@dataclass(frozen=True)
class Cell:
    """A press on a task; `spec` is everything that decides the result, `id` its hash."""

    press: str
    source: Source
    spec: Mapping[str, Any]
    id: str

    @property
    def label(self) -> str:
        """How progress lines and error messages call the cell."""
        return f"{self.press} on {self.place}"

    @property
    def place(self) -> str:
        """Task, length and depth in words."""
        length = f" at {self.source.length}" if self.source.length else ""
        return f"{self.source.task}{length}{self.where}"

    @property
    def weight(self) -> int:
        """How much work a sample is, beside those of other cells: its tokens."""
        return max(1, self.source.length)

    @property
    def depth(self) -> float | None:
        """Where the answer is hidden, if the run says so."""
        return self.spec.get("depth")

    @property
    def where(self) -> str:
        """The depth in words."""
        return "" if self.depth is None else f", depth {self.depth:g}"


def expand_tasks(config: RunConfig) -> list[Source]:
    """Return every task and length of a run; files are read, so that a missing one is known early."""
    sources: list[Source] = []
    filler = read_filler(config.filler)
    for name in config.tasks:
        if is_longbench(name):
            named = {(source.task, source.length) for source in sources}
            sources += [task for task in expand(name, config) if (task.task, task.length) not in named]
            continue
        if name == GSM8K:
            sources.append(read_task(config.data_dir))
            continue
        if not name.startswith(PREFIX):
            questions = read_questions(name, config.data_dir) if name in SOURCES else None
            depths = (None,) if name in UNPLACED else config.depths or (config.depth,)
            sources += [
                TaskLength(name, length, depth=depth, filler=filler, questions=questions)
                for length in config.lengths
                for depth in depths
            ]
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


def make_cells(config: RunConfig, sources: Sequence[Source], fingerprint: str, device: str, dtype: str) -> list[Cell]:
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
        "max_seconds_per_sample": config.max_seconds_per_sample,
    }
    cells = []
    for press in config.presses:
        for source in sources:
            own = {**source.identity(config), "max_new_tokens": source.max_new_tokens(config)}
            spec = {**shared, **own, "press": press, "task": source.task, "length": source.length}
            cells.append(Cell(press, source, spec, hash_json(spec)[:16]))
    return cells


def hash_json(value: object) -> str:
    """Return the SHA-256 of a value's canonical JSON: sorted keys, no spaces, no NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
