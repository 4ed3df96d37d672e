# SPDX-License-Identifier: Apache-2.0
"""Look up tasks by name; every file in `kinds` registers a kind of tasks."""

from __future__ import annotations

from itertools import groupby

from kvpress_eval.common.discovery import modules_of
from kvpress_eval.common.errors import unknown_name
from kvpress_eval.common.files import hash_json
from kvpress_eval.tasks.source import Kind, Source, TaskSettings

KINDS: list[Kind] = [module.KIND for module in modules_of("kvpress_eval.tasks.kinds")]


def kind_of(name: str) -> Kind:
    """Return the kind of a task, or raise a ValueError with the nearest names."""
    for kind in KINDS:
        if name in kind.names or (kind.prefix and name.startswith(kind.prefix)):
            return kind
    names = [valid for kind in KINDS for valid in kind.names]
    group, _, subset = name.partition(":")
    subsets = [valid.partition(":")[2] for valid in names if valid.startswith(f"{group}:")]
    if subsets:
        raise ValueError(unknown_name(f"subset of {group}", subset, subsets))
    raise ValueError(unknown_name("task", name, [valid for valid in names if ":" not in valid]))


def expand_tasks(request: TaskSettings) -> list[Source]:
    """Return every task and length of a run once; files are read here, so that a missing file raises before the run."""
    sources: dict[tuple[str, int, str], Source] = {}
    for kind, names in groupby(request.tasks, kind_of):
        for source in kind.expand(list(names), request):
            sources.setdefault((source.task, source.length, hash_json(dict(source.identity))), source)
    return list(sources.values())
