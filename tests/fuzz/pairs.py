# SPDX-License-Identifier: Apache-2.0
"""Number of pairs that a cache should hold under a spec.

REFINE HERE: these are the ratios, budgets and intervals of a spec. When a recipe gives its counts, use them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.fuzz.specs import Tree, inside, intervals, methods, parts_of, place_of, setting

STREAMING = {"duo_attention", "rlkv"}
"""Some heads keep everything and the others a window: see `streaming_window`."""
BETWEEN_LAYERS = {"cake", "pyramidkv", "kvzip", "kvgrad", "fastkvzip", "kvcompose", "headkv", "uncomp"}
"""Layers share one budget, so only their mean is predictable."""
DECIDING = {"simlayerkv", "lukv", "budgeted", "frontier"}
"""The number of kept pairs depends on the data, on a file, or on bytes."""
PROTECTED = 16
"""Prompts of fewer tokens, or what another press has left of them, may be kept whole.

Sinks and windows of all methods, as drawn here, are shorter.
"""


@dataclass
class Event:
    """A turn of one row."""

    new: int
    """New tokens."""
    read: int
    """Generated tokens that were read."""
    evicts: bool
    """Whether presses act on its prompt."""


@dataclass
class Cut:
    """An eviction from one row."""

    press: Tree
    """Press that evicts."""
    seen: int
    """Tokens seen so far."""
    stored: int
    """Pairs per head before the eviction."""
    target: int
    """Pairs per head that the press keeps, on average over layers."""


@dataclass
class Expected:
    """Pairs of one layer after some turns of one row."""

    pairs: int
    """Pairs per head, averaged over the heads."""
    cuts: list[Cut]
    """All evictions so far."""


def expected_pairs(tree: Tree, events: Sequence[Event], layer: int) -> Expected | None:
    """Return the pairs of one layer after these turns; None where the spec does not fix their number.

    Ratios are of all tokens seen; for composed presses, the ratio of each applies to the pairs left by the previous one. The
    number of pairs kept of a prompt stays the budget of methods that evict while tokens are generated, unless a schedule sets
    another. An interval counts generated tokens since the last eviction by any press; a press that keeps everything does not
    count. A later turn counts as one token; presses that leave prompts alone cut it at once if it is as long as their target.
    """
    tree = _without_advice(tree)
    if any(part["name"] in DECIDING or part.get("threshold") or part.get("decoding") for part in inside(tree)):
        return None
    prompt, schedules = _phases(tree)
    stored, seen, age, budget = 0, 0, 0, None
    cuts: list[Cut] = []
    for event in events:
        turn, seen = seen > 0, seen + event.new
        age += turn
        stored += event.new
        removing = [press for press in prompt if _removes(press)]
        if event.evicts and removing:
            budget = seen
            for press in removing:
                share = _of_prompt(press, budget, layer)
                if share is None or (budget < seen and budget <= PROTECTED):
                    return None
                cuts.append(Cut(press, seen, stored, share))
                budget = share
            stored, age = min(stored, budget), 0
        for press in schedules if turn else ():
            interval, target = _of_decoding(press, seen, budget)
            fills = target is not None and press["name"] in intervals() and event.new >= max(1, target)
            if press not in prompt and target is not None and (age >= interval or fills):
                cuts.append(Cut(press, seen, stored, target))
                stored, age = min(stored, target), 0
        for _ in range(event.read):
            seen, stored, age = seen + 1, stored + 1, age + 1
            for press in schedules:
                interval, target = _of_decoding(press, seen, budget)
                if age >= interval and target is not None:
                    cuts.append(Cut(press, seen, stored, target))
                    stored, age = min(stored, target), 0
    return Expected(stored, cuts)


def _without_advice(tree: Tree) -> Tree:
    """Return the spec without presses that score together with another one, which sets the number of pairs."""

    def value(item: Any) -> Any:
        if isinstance(item, list):
            return [value(part) for part in item]
        return _without_advice(item) if isinstance(item, dict) else item

    return {name: value(item) for name, item in tree.items() if name != "other"}


def _phases(tree: Tree) -> tuple[list[Tree], list[Tree]]:
    """Return the presses that evict after a prompt, in order, and those that evict while tokens are generated."""
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
    """Return the number of pairs that a press keeps of `tokens`."""
    names = {part["name"] for part in inside(press)}
    if names & STREAMING:
        return None
    scorer = list(inside(press))[-1]
    budget = setting(scorer, "budget")
    if budget is not None:
        return _routed(press, tokens, min(tokens, int(budget)))
    ratio = setting(scorer, "compression_ratio")
    if "per_layer_compression" in names:
        if "pyramidkv" in names:
            return None  # both settings give the number of pairs of a layer
        ratio = next(part["compression_ratios"] for part in inside(press) if "compression_ratios" in part)[layer]
    return _routed(press, tokens, int(tokens * (1 - ratio)))


def _routed(press: Tree, tokens: int, kept: int) -> int:
    """Return the number of pairs that stay where `vector` drops values, for `kept` pairs of the press inside it."""
    share = next((setting(part, "share") for part in inside(press) if part["name"] == "vector"), 0.0)
    return kept + int(share * max(0, min(tokens - kept, kept - 1)) / 2)


def _of_decoding(press: Tree, seen: int, prompt_budget: int | None) -> tuple[int, int | None]:
    """Return the number of tokens after which a press evicts, and the number of pairs that it keeps."""
    if press["name"] in intervals():
        ratio = setting(press, "target_compression_ratio" if "ratio" in press["name"] else "target_ratio")
        interval = int(setting(press, "compression_interval"))
        return interval, int(setting(press, "target_size")) if ratio is None else int(seen * (1 - ratio))
    scorer = list(inside(press))[-1]
    budget = setting(scorer, "budget")
    target = prompt_budget if budget is None else int(budget)
    return int(setting(scorer, "interval")), target if _removes(press) else None


def _removes(press: Tree) -> bool:
    """Return whether a press has a budget, or a ratio above 0."""
    scorer = list(inside(press))[-1]
    ratios = [ratio for part in inside(press) for ratio in part.get("compression_ratios", ())]
    ratios += [setting(scorer, "compression_ratio"), setting(scorer, "head_compression_ratio")]
    return setting(scorer, "budget") is not None or any(ratios)


def streaming_window(tree: Tree) -> tuple[int, int] | None:
    """Return the pairs that a streaming head keeps, and how many more it grows by before a cut; None without such heads."""
    streaming = next((part for part in inside(tree) if part["name"] in STREAMING), None)
    if streaming is None or not setting(streaming, "head_compression_ratio"):
        return None
    return int(setting(streaming, "sink_size")) + int(setting(streaming, "recent_size")), int(
        setting(streaming, "interval")
    )


def spared(tree: Tree) -> int:
    """Return the number of protected pairs of a head."""
    ranges = [span for part in inside(tree) if part["name"] == "protect" for span in part["tokens"].split()]
    return sum(int(end) - int(start) for start, end in (span.split(":") for span in ranges))


def between_layers(tree: Tree) -> bool:
    """Return whether layers share one budget."""
    return not any(part["name"] == "per_layer_compression" for part in inside(tree)) and any(
        part["name"] in BETWEEN_LAYERS and not setting(part, "layerwise") for part in inside(tree)
    )


def slopes(cut: Cut) -> bool:
    """Return whether pyramidkv keeps more pairs in the first layer than in the last; see `PyramidKVPress` for its budgets.

    Layers keep equally many where the last one would keep less than its window, and where all pairs fit into the target.
    """
    press = next((part for part in inside(cut.press) if part["name"] == "pyramidkv"), None)
    if press is None:
        return False
    window, ratio = int(setting(press, "window_size")), setting(press, "compression_ratio")
    length, mean = cut.seen - spared(cut.press), float(cut.target - spared(cut.press))
    if setting(press, "budget") is None and int(length * (1 - ratio)) == mean:
        mean = length * (1 - ratio)
    first = min(2 * mean - mean / int(setting(press, "beta")), length - window)
    last = 2 * mean - first
    return cut.target < cut.stored and mean < length and window <= last and round(last) < min(round(first), cut.stored)


def counts(positions: Any, row: int, pads: int, layers: Sequence[int]) -> list[list[int]]:
    """Return the number of real pairs of one row, by layer and head."""
    return [[int((head >= pads).sum()) for head in positions[layer][row]] for layer in layers]
