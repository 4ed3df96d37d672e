# SPDX-License-Identifier: Apache-2.0
"""Retrieval of one item: a pass key in a refrain, and an entry of a dictionary."""

from __future__ import annotations

import random

from kvpress_eval.tasks.filler import REPEAT
from kvpress_eval.tasks.sample import Query, Spans
from kvpress_eval.tasks.scene import LONG, SHORT, Scene, Task
from kvpress_eval.tasks.structures.needles import draw_uuid

_FEWEST = 2


def passkey(scene: Scene) -> tuple[str, Spans, Query]:
    """Build a refrain with a number of five digits (Mohtashami and Jaggi, 2023, arXiv:2305.16300)."""
    value = str(scene.rng.randrange(10_000, 100_000))
    refrain = REPEAT.sentences(scene.language, scene.rng)
    context, spans = scene.weave([[scene.prose.tell_passkey(value)]], filler=refrain)
    return context, spans, scene.prose.ask_passkey(value)


def key_value(scene: Scene) -> tuple[str, Spans, Query]:
    """Build a JSON dictionary of UUIDs; the answer is the value of one key (Liu et al., 2023, arXiv:2307.03172)."""
    key, value = draw_uuid(scene.rng), draw_uuid(scene.rng)
    seed = scene.rng.getrandbits(64)
    at = scene.rng.random() if scene.depth is None else scene.depth
    target = _entry(key, value)

    def write(count: int) -> str:
        rng = random.Random(seed)  # noqa: S311  # reproducible, not secret
        entries = [_entry(draw_uuid(rng), draw_uuid(rng)) for _ in range(count - 1)]
        entries.insert(round(at * (count - 1)), target)
        return scene.prose.dictionary("{" + ",\n ".join(entries) + "}")

    context = scene.fit(write, _FEWEST)
    start = context.index(target)
    return context, ((start, start + len(target)),), scene.prose.ask_entry(key, value)


def _entry(key: str, value: str) -> str:
    return f'"{key}": "{value}"'


TASKS = {"passkey": Task(passkey, SHORT), "kv_retrieval": Task(key_value, LONG // 2)}
