# SPDX-License-Identifier: Apache-2.0
"""Every task by its name. A kind of tasks is known because its file is in `kinds`."""

from __future__ import annotations

from itertools import groupby

from kvpress_eval.common.discovery import modules_of
from kvpress_eval.common.errors import unknown_name
from kvpress_eval.common.files import hash_json
from kvpress_eval.tasks.source import Kind, Request, Source

KINDS: list[Kind] = [module.KIND for module in modules_of("kvpress_eval.tasks.kinds")]


def kind_of(name: str) -> Kind:
    """Return the kind of a task, or raise a ValueError with the nearest names."""
    for kind in KINDS:
        if name in kind.names or (kind.prefix and name.startswith(kind.prefix)):
            return kind
    names = [known for kind in KINDS for known in kind.names]
    group, _, part = name.partition(":")
    near = [known.partition(":")[2] for known in names if known.startswith(f"{group}:")]
    if near:
        raise ValueError(unknown_name(f"subset of {group}", part, near))
    raise ValueError(unknown_name("task", name, [known for known in names if ":" not in known]))


def expand_tasks(request: Request) -> list[Source]:
    """Return every task and length of a run, each once; files are read, so that a missing one is known early."""
    found: dict[tuple[str, int, str], Source] = {}
    for kind, names in groupby(request.tasks, kind_of):
        for source in kind.expand(list(names), request):
            found.setdefault((source.task, source.length, hash_json(dict(source.identity))), source)
    return list(found.values())
