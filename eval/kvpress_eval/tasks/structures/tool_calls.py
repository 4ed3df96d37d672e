# SPDX-License-Identifier: Apache-2.0
"""Tool calls: one wrong character in an argument makes the call wrong, which low-bit caches are reported to cause."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

from kvpress_eval.tasks.sample import Query, Spans
from kvpress_eval.tasks.scene import LONG, Scene, Task

_VERBS = ("book", "cancel", "renew", "ship", "archive", "audit", "refund", "inspect")
_NOUNS = ("flight", "parcel", "invoice", "licence", "sensor", "meeting", "contract", "backup")
_FEWEST, _MOST = 2, 16
_MOST_TEXT = 20_000
"""Maximum characters of an answer that is parsed as JSON."""


def tool_call(scene: Scene) -> tuple[str, Spans, Query]:
    """Build descriptions of tools and records; the answer is a call of one tool with all values of one record.

    An identifier, a number with decimals, a flag and a list must be copied exactly and with their types.
    """
    rng, prose = scene.rng, scene.prose
    names = [f"{verb}_{noun}" for verb in _VERBS for noun in _NOUNS]
    tools = rng.sample(names, _MOST)
    keys = prose.draw_keys(rng, _MOST)
    records = [_record(rng) for _ in keys]
    sentences = [
        (f" Tool {tool}{json.dumps(_SIGNATURE)}.", f" The record of {key} is {json.dumps(record)}.")
        for tool, key, record in zip(tools, keys, records, strict=True)
    ]
    room = scene.capacity("".join(sentences[0]), _FEWEST, _MOST)
    chains = [[sentence] for pair in sentences[:room] for sentence in pair]
    context, spans = scene.weave(chains[:2], chains[2:])
    question = (
        f"\nCall the tool {tools[0]} with the record of {keys[0]}. Reply with a JSON object that has the name of the tool as "
        '"name" and the record as "arguments", and with nothing else.'
    )
    right = json.dumps({"name": tools[0], "arguments": records[0]})
    return context, spans, Query(question, "", (right,), same_call)


_SIGNATURE = {"account": "string", "amount": "number", "urgent": "boolean", "items": "array of integers"}


def _record(rng: random.Random) -> dict[str, Any]:
    return {
        "account": f"{rng.getrandbits(32):08x}-{rng.getrandbits(16):04x}",
        "amount": rng.randrange(100_000) / 100,
        "urgent": rng.random() < 0.5,
        "items": [rng.randrange(1000) for _ in range(3)],
    }


def same_call(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the first JSON object of the text has the keys, values and types of the call.

    The order of keys is ignored, and so is text around the object, such as a fence or a sentence.
    """
    start = text.find("{")
    if start < 0 or len(text) > _MOST_TEXT:
        return 0.0
    try:
        call, _ = json.JSONDecoder().raw_decode(text[start:])
    except (ValueError, RecursionError):
        return 0.0
    return float(_canonical(call) == _canonical(json.loads(answers[0])))


def _canonical(value: Any) -> str:
    """Return JSON text with sorted keys, in which 1, true and 1.0 differ, although they are equal in Python."""
    return json.dumps(value, sort_keys=True)


TASKS = {"tool_call": Task(tool_call, LONG)}
