# SPDX-License-Identifier: Apache-2.0
"""Samples from a JSON Lines file: `file:PATH.jsonl[.gz]`, optionally `file:PATH#task+task`."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from kvpress.counts import few
from kvpress_eval.common.errors import ConfigError, DataError, unknown_name
from kvpress_eval.tasks.data_files import FILE_PREFIX, reading
from kvpress_eval.tasks.kinds.generated import answer_room
from kvpress_eval.tasks.sample import Match, Query, Sample
from kvpress_eval.tasks.source import Kind, Source, TaskSettings

OWN = "data"
"""Name of the task for rows without one."""
_MATCHES = ("prefix", "contains", "any")


@dataclass(frozen=True)
class TaskFile:
    """Samples of one file."""

    path: Path
    """The file."""
    sha256: str
    """Hash of the file, which identifies it in results."""
    samples: Sequence[Sample]
    """Samples in the order of the file."""

    def tasks(self, chosen: Sequence[str]) -> list[str]:
        """Return the chosen tasks, or all tasks of the file if none is chosen.

        Raises:
            ConfigError: the file has no such task.
        """
        names = list(dict.fromkeys(sample.task for sample in self.samples))
        for name in chosen:
            if name not in names:
                raise ConfigError(f"{self.path}: {unknown_name('task', name, names)}")
        return list(chosen) or names

    def select(self, task: str, length: int) -> list[Sample]:
        """Return the samples of one task and length, in the order of the file."""
        return [sample for sample in self.samples if (sample.task, sample.length) == (task, length)]


def split_source(source: str) -> tuple[Path, list[str]]:
    """Return the path and the task names of a `file:PATH#task+task` source."""
    path, _, names = source.removeprefix(FILE_PREFIX).partition("#")
    return Path(path), [name for name in names.split("+") if name]


def read_file(path: Path) -> TaskFile:
    """Read a file of rows with context, question and answer, and optionally task, length, answer_prefix and match.

    Raises:
        DataError: the file cannot be read, or a row is invalid.
    """
    samples: list[Sample] = []
    counts: dict[tuple[str, int], int] = {}
    raw, text = _read(path)
    for number, row in _rows(path, text):
        try:
            samples.append(_sample(row, counts))
        except (ValueError, TypeError, KeyError) as error:
            raise _no_row(path, number, error) from error
    return TaskFile(path, hashlib.sha256(raw).hexdigest(), samples)


def read_rows(path: Path) -> list[dict[str, object]]:
    """Return the rows of a file as plain data."""
    return [row for _, row in _rows(path, _read(path)[1])]


def _read(path: Path) -> tuple[bytes, str]:
    with reading(path, "task file"):
        raw = path.read_bytes()
        return raw, (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()


def _rows(path: Path, text: str) -> Iterator[tuple[int, dict[str, object]]]:
    # Split as bytes: `str.splitlines` would also split at the line separators that texts contain.
    for number, line in enumerate(text.encode().splitlines(), start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError("an object is expected")
        except (ValueError, TypeError) as error:
            raise _no_row(path, number, error) from error
        yield number, row


def _no_row(path: Path, number: int, error: Exception) -> DataError:
    missing = "missing: " if isinstance(error, KeyError) else ""
    return DataError(f"{path}:{number}: not a task row ({missing}{error})")


def _expand(names: Sequence[str], request: TaskSettings) -> list[Source]:
    return [source for name in names for source in _sources(name, request)]


def _sources(name: str, request: TaskSettings) -> list[Source]:
    path, chosen = split_source(name)
    file = read_file(path)
    groups = [(task, length) for task in file.tasks(chosen) for length in (0, *request.lengths)]
    sources = [_source(file, task, length, request) for task, length in groups if file.select(task, length)]
    if not sources:
        lengths = few(sorted({sample.length for sample in file.samples}))
        raise ConfigError(f"{path} has no rows of the lengths asked for; it has {lengths or 'none'}")
    return sources


def _source(file: TaskFile, task: str, length: int, request: TaskSettings) -> Source:
    samples = file.select(task, length)[: request.samples]
    room = request.max_new_tokens or answer_room(task, request.wording)
    return Source(task, length, [sample.id for sample in samples], lambda _: samples, {"file": file.sha256}, room)


def _sample(row: dict[str, object], counts: dict[tuple[str, int], int]) -> Sample:
    context, question = _text(row, "context"), _text(row, "question")
    task, prefix = _text(row, "task", OWN), _text(row, "answer_prefix", "")
    answers = _answers(row)
    length = row.get("length", 0)
    if not isinstance(length, int):
        raise TypeError("length must be an integer")
    match = row.get("match", "prefix" if prefix else "any")
    if match not in _MATCHES:
        raise ValueError(f"match must be {', '.join(_MATCHES[:-1])} or {_MATCHES[-1]}, got {match!r}")
    index = counts[task, length] = counts.get((task, length), -1) + 1
    matches = ((context.find(answer), answer) for answer in answers)
    spans = tuple((at, at + len(answer)) for at, answer in matches if at >= 0)
    query = Query(question, prefix, answers, cast(Match, match))
    return Sample(f"{task}-{length}-{index}", task, length, context, query, spans)


def _answers(row: dict[str, object]) -> tuple[str, ...]:
    value = row["answer"]
    answers = value if isinstance(value, list) else [value]
    if not answers or not all(isinstance(answer, str) and answer for answer in answers):
        raise TypeError("answer must be text, or a list of texts")
    return tuple(answers)


def _text(row: dict[str, object], field: str, default: str | None = None) -> str:
    value = row[field] if default is None else row.get(field, default)
    if not isinstance(value, str):
        raise TypeError(f"{field} must be text")
    return value


KIND = Kind((), _expand, FILE_PREFIX)
