"""Samples from a JSON Lines file: `file:PATH.jsonl[.gz]`, optionally `file:PATH#task+task`."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpress_eval.common.errors import ConfigError, DataError, unknown_name
from kvpress_eval.tasks.kinds.generated import answer_room
from kvpress_eval.tasks.local import PREFIX, reading
from kvpress_eval.tasks.sample import Query, Sample
from kvpress_eval.tasks.source import Kind, Request, Source

_TEXT_FIELDS = ("task", "context", "question", "answer_prefix", "answer")


@dataclass(frozen=True)
class TaskFile:
    """All samples of one file, and the hash that says which file it was."""

    path: Path
    sha256: str
    samples: Sequence[Sample]

    def tasks(self, chosen: Sequence[str]) -> list[str]:
        """Return the tasks of the file, or the chosen ones among them."""
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
    path, _, names = source.removeprefix(PREFIX).partition("#")
    return Path(path), [name for name in names.split("+") if name]


def read_file(path: Path) -> TaskFile:
    """Read a file of rows with task, length, context, question, answer_prefix and answer."""
    with reading(path, "task file"):
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
    samples: list[Sample] = []
    counts: dict[tuple[str, int], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            sample = _sample(json.loads(line), counts)
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path}:{number}: not a task row ({error})") from error
        samples.append(sample)
    return TaskFile(path, hashlib.sha256(raw).hexdigest(), samples)


def _expand(names: Sequence[str], request: Request) -> list[Source]:
    return [source for name in names for source in _sources(name, request)]


def _sources(name: str, request: Request) -> list[Source]:
    path, chosen = split_source(name)
    file = read_file(path)
    places = [(task, length) for task in file.tasks(chosen) for length in request.lengths]
    found = [_source(file, task, length, request) for task, length in places if file.select(task, length)]
    if not found:
        lengths = ", ".join(map(str, sorted({sample.length for sample in file.samples})))
        raise ConfigError(f"{path} has no rows of the lengths asked for; it has {lengths or 'none'}")
    return found


def _source(file: TaskFile, task: str, length: int, request: Request) -> Source:
    samples = file.select(task, length)[: request.samples]
    room = request.max_new_tokens or answer_room(task, request.wording)
    return Source(task, length, [sample.id for sample in samples], lambda _: samples, {"file": file.sha256}, room)


def _sample(row: dict[str, object], counts: dict[tuple[str, int], int]) -> Sample:
    task, context, question, prefix, answer = (_text(row, field) for field in _TEXT_FIELDS)
    length = row["length"]
    if not isinstance(length, int):
        raise TypeError("length must be an integer")
    index = counts[task, length] = counts.get((task, length), -1) + 1
    at = context.find(answer)
    spans = ((at, at + len(answer)),) if at >= 0 else ()
    query = Query(question, prefix, (answer,), "prefix")
    return Sample(f"{task}-{length}-{index}", task, length, context, query, spans)


def _text(row: dict[str, object], field: str) -> str:
    value = row[field]
    if not isinstance(value, str):
        raise TypeError(f"{field} must be text")
    return value


KIND = Kind((), _expand, PREFIX)
