# SPDX-License-Identifier: Apache-2.0
"""How many pairs a spec says that a cache holds.

REFINE HERE: these are the ratios, budgets and intervals of a spec. When a recipe can be asked for its counts, ask it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.fuzz.specs import Tree, inside, intervals, methods, parts_of, place_of, setting

STREAMING = {"duo_attention", "rlkv"}
"""Some heads keep everything and the others a window: see `streaming_window`."""
BETWEEN_LAYERS = {"cake", "pyramidkv", "kvzip", "fastkvzip", "kvcompose", "headkv", "uncomp"}
"""Layers share one budget, so only their mean is known."""
DECIDING = {"simlayerkv", "lukv", "budgeted", "frontier"}
"""How much they keep depends on what they see, on a file, or on bytes."""
PROTECTED = 16
"""Prompts of fewer tokens may be left whole: sinks and windows of all methods, as they are drawn here, are below."""


@dataclass
class Event:
    """A turn of one row: its new tokens, how many generated ones were read, and whether presses act on its prompt."""

    new: int
    read: int
    evicts: bool


def expected_pairs(tree: Tree, events: Sequence[Event], layer: int) -> float | None:
    """Return the pairs per head of one layer, on average over its heads, after these turns; None where a spec does not say.

    Ratios are of all tokens seen; of presses in a row each is of what the one before it leaves. What is kept of a prompt stays
    the budget of methods that evict while tokens are generated, unless a schedule sets another. An interval counts generated
    tokens since pairs were last evicted, by whichever press; one that keeps everything counts for nothing. A later turn
    counts as one token; presses that leave prompts alone cut it at once if it is as long as their target.
    """
    tree = _without_advice(tree)
    if any(part["name"] in DECIDING or part.get("threshold") or part.get("decoding") for part in inside(tree)):
        return None
    prompt, schedules = _phases(tree)
    stored, seen, since, held = 0, 0, 0, None
    for event in events:
        turn, seen = seen > 0, seen + event.new
        since += turn
        stored += event.new
        removing = [press for press in prompt if _removes(press)]
        if event.evicts and removing:
            held = seen
            for press in removing:
                share = _of_prompt(press, held, layer)
                if share is None:
                    return None
                held = share
            stored, since = min(stored, held), 0
        for press in schedules if turn else ():
            interval, target = _of_decoding(press, seen, held)
            fills = target is not None and press["name"] in intervals() and event.new >= max(1, target)
            if press not in prompt and target is not None and (since >= interval or fills):
                stored, since = min(stored, target), 0
        for _ in range(event.read):
            seen, stored, since = seen + 1, stored + 1, since + 1
            for press in schedules:
                interval, target = _of_decoding(press, seen, held)
                if since >= interval and target is not None:
                    stored, since = min(stored, target), 0
    return stored


def _without_advice(tree: Tree) -> Tree:
    """The same spec without presses that score beside another one, which says how many pairs stay."""

    def value(item: Any) -> Any:
        if isinstance(item, list):
            return [value(part) for part in item]
        return _without_advice(item) if isinstance(item, dict) else item

    return {name: value(item) for name, item in tree.items() if name != "other"}


def _phases(tree: Tree) -> tuple[list[Tree], list[Tree]]:
    """What evicts after a prompt, in order, and what evicts while tokens are generated."""
    prompt: list[Tree] = []
    schedules: list[Tree] = []
    for part in parts_of(tree):
        if part["name"] == "prefill_decoding":
            prompt.append(part["prefilling_press"])
            schedules.append(part["decoding_press"])
        elif part["name"] in intervals():
            schedules.append(part)
        elif place_of(part) == "selector":
            continue
        elif place_of(part) in ("scorer", "wrapper") or methods()[part["name"]].holds == "press":
            prompt.append(part)
            if any(inner["name"] == "h2o" for inner in inside(part)):
                schedules.append(part)
    return prompt, schedules


def _of_prompt(press: Tree, tokens: int, layer: int) -> int | None:
    """How many of so many pairs a press keeps."""
    names = {part["name"] for part in inside(press)}
    if names & STREAMING:
        return None
    scorer = list(inside(press))[-1]
    budget = setting(scorer, "budget")
    if budget is not None:
        return min(tokens, int(budget))
    ratio = setting(scorer, "compression_ratio")
    if "per_layer_compression" in names:
        if "pyramidkv" in names:
            return None  # two answers to how much a layer keeps
        ratio = next(part["compression_ratios"] for part in inside(press) if "compression_ratios" in part)[layer]
    return int(tokens * (1 - ratio))


def _of_decoding(press: Tree, seen: int, held: int | None) -> tuple[int, int | None]:
    """After how many tokens a press evicts, and down to how many pairs."""
    if press["name"] in intervals():
        ratio = setting(press, "target_compression_ratio" if "ratio" in press["name"] else "target_ratio")
        interval = int(setting(press, "compression_interval"))
        return interval, int(setting(press, "target_size")) if ratio is None else int(seen * (1 - ratio))
    scorer = list(inside(press))[-1]
    budget = setting(scorer, "budget")
    target = held if budget is None else int(budget)
    return int(setting(scorer, "interval")), target if _removes(press) else None


def _removes(press: Tree) -> bool:
    """Whether a press has a budget, or a ratio above 0."""
    scorer = list(inside(press))[-1]
    ratios = [ratio for part in inside(press) for ratio in part.get("compression_ratios", ())]
    ratios += [setting(scorer, "compression_ratio"), setting(scorer, "head_compression_ratio")]
    return setting(scorer, "budget") is not None or any(ratios)


def streaming_window(tree: Tree) -> tuple[int, int] | None:
    """Return the pairs that a streaming head keeps, and after how many more it is cut again; None without such heads."""
    found = next((part for part in inside(tree) if part["name"] in STREAMING), None)
    if found is None or not setting(found, "head_compression_ratio"):
        return None
    return int(setting(found, "sink_size")) + int(setting(found, "recent_size")), int(setting(found, "interval"))


def spared(tree: Tree) -> int:
    """How many pairs of a head no eviction takes."""
    ranges = [each for part in inside(tree) if part["name"] == "protect" for each in part["tokens"].split()]
    return sum(int(end) - int(start) for start, end in (each.split(":") for each in ranges))


def between_layers(tree: Tree) -> bool:
    """Whether layers share one budget."""
    return not any(part["name"] == "per_layer_compression" for part in inside(tree)) and any(
        part["name"] in BETWEEN_LAYERS and not setting(part, "layerwise") for part in inside(tree)
    )


def counts(positions: Any, row: int, pads: int, layers: Sequence[int]) -> list[list[int]]:
    """Real pairs of one row, by layer and head."""
    return [[int((head >= pads).sum()) for head in positions[layer][row]] for layer in layers]
