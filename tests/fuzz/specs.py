# SPDX-License-Identifier: Apache-2.0
"""Specs drawn from the registry: every registered press, with settings that fit prompts of some dozens of tokens.

A press is a tree, the plain data of `kvpress.press_to_dict`: its name, and what differs from the defaults. The registry says
which place a method takes: by its role, and by whether its class holds another press. Settings are chosen by the name of a
field, so a new method whose fields are listed here is drawn as soon as it is registered.
"""

from __future__ import annotations

import ast
import dataclasses
import random
import re
from collections.abc import Iterator
from functools import cache
from itertools import cycle, islice
from typing import Any, Literal

import kvpress
from kvpress.core.registry import find
from tests.fuzz.models import FILES, growing, path_of

Tree = dict[str, Any]

VALUES: dict[str, tuple[Any, ...]] = {
    "compression_ratio": (0.25, 0.5),
    "head_compression_ratio": (0.5,),
    "compression_ratios": ((0.25, 0.5, 0.75), (0.5, 0.25, 0.5)),
    "window_size": (4, 8),
    "kernel_size": (3, 5),
    "n_sink": (2, 4),
    "sink_size": (2,),
    "recent_size": (6, 9),
    "sink_size_start": (2,),
    "sink_size_end": (2,),
    "n_future_positions": (16, 64),
    "chunk": (7, 16),
    "chunk_size": (8, 16),
    "chunk_length": (7, 16),
    "block_size": (5, 16),
    "sketch_dimension": (8, 16),
    "beta": (4, 20),
    "seed": (3,),
    "repeat_prompt": ("",),
    "recent_ratio": (0.25, 0.5),
    "interval": (3, 4),
    "lag_size": (5, 8),
    "num_sinks": (2,),
    "local_window_size": (4, 7),
    "tau": (5.0, 1.0),
    "sliding_window_size": (4, 8),
    "similarity_threshold": (0.0, 0.3),
    "merge_fraction": (1.0, 0.5),
    "target_compression_ratio": (0.5, 0.25),
    "sink": (2, 4),
    "window": (1, 3),
    "key_channel_compression_ratio": (0.5, 0.3),
    "window_ratio": (0.1, 0.02),
    "keep_token_lower_bound": (0, 2),
    "agg_task": ("max", "mean"),
    "agg_group": ("max", "mean"),
    "agg_head": ("max", "mean"),
    "decay": (None, 0.9),
    "alpha_safeguard": (0.2, 0.0),
    "first_stage_ratio": (0.5,),
    "share": (0.25, 1.0),
    "random_share": (0.37, 0.0, 1.0),
    "temperature": (1.0, 0.05),
    "smaller": (3.0, 8.0),
    "bytes": (None, 30000),
    "weight": (0.5, 0.2),
    "ridge": (0.01, 0.1),
    "compression_interval": (3, 5),
    "target_size": (14, 20),
    "target_ratio": (None, None, 0.5),
    "hidden_states_buffer_size": (16,),
    "merge_budget": (4, 32),
    "lazy_threshold": (0.05, 0.2),
    "n_last": (1, 3),
    "n_recent": (6, 12),
    "n_initial": (2,),
    "bits": (2, 4, 8),
    "low_bits": (2,),
    "group_size": (4, 8),
    "residual_length": (4, 8),
    "buffer_length": (4,),
    "sinks": (0, 2),
    "rank": (2,),
    "generated_rank": (1, 2),
    "probe_ratio": (0.25, 1),
    "page_size": (4,),
    "correction": (0, 0, 3),
    # Files of `tests.fuzz.models`, written in braces.
    "stats_folder": ("{statistics}",),
    "table": ("{table}",),
    "filters": ("{filters}",),
    "curve": ("{curve}",),
    "gates": ("{gates}",),
}
"""Values of fields by name. Choices (`Literal`) and switches (`bool`) need none; other fields keep their default."""
OF_METHOD: dict[tuple[str, str], tuple[Any, ...]] = {
    ("cq", "bits"): (4,),
    ("cq", "coupled"): (2,),
    ("cq", "calibration"): ("{books}",),
    ("block_gtq", "bits"): (2, 3, (4, 2)),
    ("block_gtq", "calibration"): ("{energies}",),
    ("aquakv", "bits"): (2, 3, (4, 2)),
    ("aquakv", "calibration"): ("{predictors}",),
    ("kvquant", "bits"): (2, 3, (4, 2)),
    ("kvquant", "calibration"): ("{levels}",),
    ("adaquant", "bits"): ((4, 2), (8, 4)),
    ("squat", "block_size"): (4,),
    ("squat", "rotate"): (False,),
    ("kvarn", "tile_size"): (4, 8),
    ("kvarn", "sinks"): (0, 4),
    ("saw_int4", "block_size"): (None, 4),
    ("saw_int4", "group_size"): (None, 8),
    ("leank", "calibration"): ("{scales}",),
    ("leank", "ratio"): (0.5, 0.25),
    ("leank", "align"): (4, 8),
    ("leank", "interval"): (4, 8),
    ("leank", "sink_size"): (0, 3),
    ("leank", "recent_size"): (0, 6),
    ("sparse_dllm", "block_length"): (4, 8),
    ("sparse_dllm", "kernel_size"): (1, 3),
    ("double_sparsity", "calibration"): ("{channels}",),
    ("double_sparsity", "skip_layers"): (0,),
    ("double_sparsity", "budget"): (12, 0.25),
    ("quest", "skip_layers"): (0,),
    ("quest", "budget"): (12, 0.25),
    ("infllm_v2", "budget"): (16, 0.4),
    ("infllm_v2", "block_size"): (4, 8),
    ("infllm_v2", "kernel_size"): (2, 4),
    ("infllm_v2", "stride"): (2,),
    ("infllm_v2", "n_sink"): (0, 4),
    ("infllm_v2", "n_recent"): (4, 8),
    ("loopserve", "budget"): (12, 0.25),
    ("loopserve", "coverage"): (1.0,),
    ("loopserve", "last"): (4, 12),
    ("loopserve", "every"): (3, 5),
    ("loki", "budget"): (12, 0.25),
    ("loki", "channels"): (4, 8),
    ("loki", "keys"): ("rotated",),
    ("pqcache", "budget"): (12, 0.25),
    ("pqcache", "parts"): (2, 4),
    ("pqcache", "bits"): (3, 5),
    ("sparq", "budget"): (12, 0.25),
    ("sparq", "channels"): (4, 8),
    ("twilight", "p"): (0.5, 0.9),
    ("twilight", "press"): (
        {"name": "quest", "budget": 12, "page_size": 4, "skip_layers": 0},
        {"name": "sparq", "budget": 0.5, "channels": 4, "mean_value": False},
    ),
    ("vattention", "epsilon"): (0.5, 0.05),
    ("vattention", "press"): (
        {"name": "quest", "budget": 12, "page_size": 4, "skip_layers": 0},
        {"name": "pqcache", "budget": 0.25, "bits": 3, "parts": 4},
    ),
    ("offload", "press"): (
        {"name": "quest", "budget": 12, "page_size": 4, "skip_layers": 0},
        {"name": "loki", "budget": 0.25, "channels": 4, "skip_layers": 0},
    ),
    ("offload", "to"): ("file",),
    ("tidal_decode", "skip_layers"): (0,),
    ("tidal_decode", "budget"): (12, 0.25),
    ("duo_attention", "table"): (None,),
    ("nestedkv", "tau"): (0.6, 0.2),
    ("frontier", "chunk"): (None, 16, 40),
    ("frontier", "passes"): (2, 1, 3),
    ("frontier", "gates"): (None,),
    ("kvzap", "model_type"): ("linear",),
    ("kvzap", "weights"): ("{networks}",),
    ("headkv", "beta"): (1.2, 4.0),
    ("triattention", "distances"): (4, 17),
    ("uncomp", "drop"): (0.0, 0.1),
    ("uncomp", "queries"): (8, 512),
    ("refit", "ridge"): (1.0, 4.0),
    ("refit", "tokens"): (4, 32),
    ("attention_matching", "ridge"): (1.0,),
    ("attention_matching", "tokens"): (32,),
    ("oscar", "group_size"): (None, 8),
    ("oscar", "calibration"): ("{rotations}",),
    ("vector", "calibration"): ("{predictors}",),
    ("mix", "other"): ({"name": "keydiff"}, {"name": "tova"}),
    ("duo_attention", "on_the_fly_scoring"): (True,),
    ("protect", "tokens"): ("0:2", "1:3 4:5"),
    # Random ids hold no markers, so the phases of a first prompt are ranges.
    ("agentkv", "queries"): (6, 16),
    ("agentkv", "think"): ("", "1:3 4:5"),
    ("agentkv", "act"): ("", "0:1"),
    ("agentkv", "tool"): ("",),
    ("agentkv", "roles"): (False,),
}
"""Values of a field of one method, where the name means something else there or needs other values."""
EVERYTHING = 4096
"""A budget, a target or a residual that no conversation here exceeds."""
KEEP_ALL: dict[str, Any] = {
    "compression_ratio": 0.0,
    "ratio": 0.0,
    "head_compression_ratio": 0.0,
    "key_channel_compression_ratio": 0.0,
    "compression_ratios": 0.0,
    "budget": EVERYTHING,
    "target_size": EVERYTHING,
    "target_ratio": None,
    "target_compression_ratio": 0.0,
    "threshold": -1e9,
    "lazy_threshold": 1.0,
    "smaller": None,
    "bytes": "1GB",
    "residual_length": EVERYTHING,
    "p": 1.0,
}
"""Settings, by field, with which a press keeps every pair unchanged."""


@dataclasses.dataclass(frozen=True)
class Method:
    """A registered press."""

    name: str
    place: Literal["scorer", "wrapper", "codec", "selector", "structure"]
    """Place that it takes in a spec."""
    choices: dict[str, tuple[Any, ...]]
    """Values of each field that is drawn."""
    holds: str = ""
    """The field that holds the press inside."""


def _place(entry: Any, holds: str) -> Any:
    if entry.role in ("quantise", "select"):
        return {"quantise": "codec", "select": "selector"}[entry.role]
    if entry.role not in ("evict", "budget"):
        return "structure"
    return "wrapper" if holds else "scorer"


@cache
def methods() -> dict[str, Method]:
    """Return every registered press by name; presses registered by tests are left out."""
    entries_by_name = {}
    for entry in kvpress.list_presses():
        if not entry.press.__module__.startswith("kvpress.") or any(item.suite == "fuzz" for item in entry.exempt):
            continue
        fields = [field for field in dataclasses.fields(entry.press) if field.init]
        holds = next((f.name for f in fields if "Press" in str(f.type) and "list" not in str(f.type)), "")
        choices = {field.name: OF_METHOD.get((entry.name, field.name), _values(field)) for field in fields}
        choices = {name: values for name, values in choices.items() if values}
        entries_by_name[entry.name] = Method(entry.name, _place(entry, holds), choices, holds)
    return entries_by_name


def _values(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    if field.name in VALUES:
        return VALUES[field.name]
    if str(field.type) == "bool":
        return field.default, field.default, not field.default
    choices = re.search(r"Literal\[(.*)\]$", str(field.type))
    return (field.default, *ast.literal_eval(f"({choices[1]},)")) if choices else ()


def names(place: str) -> list[str]:
    """Names of the methods that take a place in a spec."""
    return [method.name for method in methods().values() if method.place == place]


def intervals() -> list[str]:
    """Names of the structures that evict by one press, again and again while tokens are generated."""
    return [name for name in names("structure") if methods()[name].holds == "base_press"]


def schedules() -> list[str]:
    """Return the names of schedules: when a press evicts, and from which settings it gets its budget."""
    return ["ratio", "budget", "after another", "bounded", *intervals(), "prefill_decoding"]


# -- text and trees ----------------------------------------------------------------------------------------------------


def resolved(spec: str, family: str) -> str:
    """Replace the names in braces by files of a family."""
    return re.sub(r"\{(\w+)\}", lambda match: path_of(match[1], family), spec)


def tree_of(spec: str, family: str = "llama") -> Tree:
    """Read a spec for a family: with its files, and as many ratios as it has layers that grow."""
    tree = kvpress.press_to_dict(kvpress.get_press(resolved(spec, family)))
    for part in inside(tree):
        if "compression_ratios" in part:
            part["compression_ratios"] = list(islice(cycle(part["compression_ratios"]), growing(family)))
    return tree


def text_of(tree: Tree) -> str:
    """Write a tree as a spec."""
    text = kvpress.to_spec(kvpress.press_from_dict(tree))
    for name in FILES:
        text = text.replace(path_of(name, "llama"), f"{{{name}}}")
    return text


def parts_of(tree: Tree) -> list[Tree]:
    """Return the presses that are composed with `+`."""
    return tree["presses"] if tree["name"] == "composed" else [tree]


def composed(parts: list[Tree]) -> Tree:
    """Compose presses with `+`."""
    return parts[0] if len(parts) == 1 else {"name": "composed", "presses": parts}


def inside(tree: Tree) -> Iterator[Tree]:
    """Yield every press of a tree, itself first."""
    yield tree
    for value in tree.values():
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                yield from inside(part)


def place_of(tree: Tree) -> str:
    """Return the place that a tree's outermost press takes."""
    return methods()[tree["name"]].place


def fields_of(tree: Tree) -> set[str]:
    """Return the names of the settings of a press."""
    return {field.name for field in dataclasses.fields(find(tree["name"]).press) if field.init}


def setting(tree: Tree, field: str) -> Any:
    """Return a setting of a press, its default where the tree does not have it."""
    item = next((f for f in dataclasses.fields(find(tree["name"]).press) if f.name == field), None)
    return tree.get(field, None if item is None else item.default)


def changed(tree: Tree, settings: dict[str, Any], place: str | None = None) -> Tree:
    """Set fields in every press of a tree that has them; with `place` only in presses that take it."""

    def value(item: Any) -> Any:
        if isinstance(item, list):
            return [value(part) for part in item]
        return changed(item, settings, place) if isinstance(item, dict) else item

    fields_by_name = {name: value(item) for name, item in tree.items()}
    if place in (None, place_of(tree)):
        fields = fields_of(tree)
        if "compression_ratio" in fields and "budget" not in tree:
            fields -= {"budget"}  # a press has only one of them
        for name in fields & set(settings):
            if name == "compression_ratios":
                fields_by_name[name] = [settings[name]] * len(tree[name])
            else:
                fields_by_name[name] = settings[name]
    return fields_by_name


def keeps_all(tree: Tree) -> Tree:
    """Return the spec with every ratio at 0, every budget and target beyond reach, and nothing old enough to be encoded."""
    tree = composed([{field: _judged(value) for field, value in part.items()} for part in parts_of(tree)])
    evicting = [part for part in inside(tree) if methods()[part["name"]].place != "selector"]
    has_budget = any("budget" in part for part in evicting)  # a threshold excludes a budget
    return changed(tree, {name: value for name, value in KEEP_ALL.items() if not (has_budget and name == "threshold")})


def _judged(item: Any) -> Any:
    """Return a tree without the `dms` wrapper, which must be outermost and needs a threshold."""
    if not isinstance(item, dict):
        return item
    return _judged(item["press"]) if item["name"] == "dms" else {name: _judged(value) for name, value in item.items()}


def evicts_generated(tree: Tree) -> bool:
    """Whether a press of the spec evicts while tokens are generated."""
    return any(step.acts_in("decode") for step in kvpress.press_from_dict(tree).recipe().evictions)


def corrects(tree: Tree) -> bool:
    """Whether a selector of the spec reads generated tokens again."""
    return any(part.get("correction") for part in parts_of(tree))


def selects_all(tree: Tree) -> Tree:
    """Return the spec with a selector that may read everything.

    A selector that corrects tokens reads them again, with fewer pairs if some were evicted since, and with other ones if some
    were encoded: correction is off there.
    """
    encoded = any(place_of(part) == "codec" for part in parts_of(tree))
    settings = {"correction": 0} if encoded or evicts_generated(tree) else {}
    return changed(tree, {"budget": EVERYTHING, "p": 1.0, **settings}, "selector")


def without(tree: Tree, place: str) -> Tree:
    """Return the spec without its codec or its selector; `none` if nothing is left."""
    return composed([part for part in parts_of(tree) if place_of(part) != place] or [{"name": "none"}])


# -- drawing -----------------------------------------------------------------------------------------------------------


def seeded(seed: int) -> random.Random:
    """Return the random generator of all draws."""
    return random.Random(seed)  # noqa: S311 - nothing is secret here


def settings_for(name: str, rng: random.Random, inner: bool = False) -> Tree:
    """Draw settings of one method; `inner` presses, whose ratio comes from a wrapper, keep their own at 0."""
    method = methods()[name]
    settings: Tree = {}
    for field, values in method.choices.items():
        value = rng.choice(values)
        if value is not None and not (inner and field in ("compression_ratio", "compression_ratios")):
            settings[field] = value
    if "bytes" in settings:
        settings.pop("smaller")
    if settings.get("normalize") != "decay":
        settings.pop("decay", None)
    elif "decay" not in settings:
        settings["decay"] = 0.9
    return {"name": name, **settings}


def evicting(scorer: str, wrapper: str | None, outer: str | None, schedule: str, rng: random.Random) -> list[Tree]:
    """Draw the evicting part of a spec: one scorer, up to two wrappers and a schedule."""
    inner = schedule in (*intervals(), "prefill_decoding") or bool(
        {"per_layer_compression", "budgeted"} & {wrapper, outer}
    )
    tree = settings_for(scorer, rng, inner)
    if schedule == "budget" and "compression_ratio" in tree:
        del tree["compression_ratio"]
        tree["budget"] = rng.choice((18, 30))
    for name in (wrapper, outer):
        if name is not None:
            tree = {**settings_for(name, rng, inner and name != "per_layer_compression"), methods()[name].holds: tree}
            if name == "per_layer_compression":
                tree["compression_ratios"] = rng.choice(VALUES["compression_ratios"])
    if schedule == "bounded":
        return [{**settings_for(schedule, rng), "press": tree}]
    if schedule == "after another":
        return [settings_for(rng.choice(BEFORE), rng), tree]
    if schedule in intervals():
        tree = {**settings_for(schedule, rng), "base_press": tree}
    if schedule == "prefill_decoding":
        tree = {**settings_for("decoding", rng), "base_press": tree}
        before = settings_for(rng.choice(BEFORE), rng)
        tree = {"name": "prefill_decoding", "prefilling_press": before, "decoding_press": tree}
    return [tree]


BEFORE = ("knorm", "snapkv", "expected_attention", "tova")
"""First press, where two presses evict one after the other."""


@cache
def rewrites(name: str) -> bool:
    """Return whether a method, by itself, replaces the pairs that it keeps."""
    entry = find(name)
    return any(step.rewrite is not None for step in kvpress.get_press(entry.example).recipe().evictions)


@cache
def encodes(name: str) -> bool:
    """Return whether a method that evicts also sets the storage of pairs."""
    return place_of({"name": name}) != "codec" and kvpress.get_press(find(name).example).recipe().codec is not None


def is_spec(trees: list[Tree]) -> bool:
    """Return whether the presses can be composed; refusals and their messages are tested elsewhere."""
    try:
        recipe = kvpress.press_from_dict(resolved_tree(composed(trees))).recipe()
    except (TypeError, ValueError):
        return False
    # Sealed pairs can be neither rotated nor merged into: refused in the second turn.
    sealed = recipe.codec is not None or recipe.selector is not None
    return not (sealed and any(step.rewrite is not None for step in recipe.evictions))


def resolved_tree(tree: Tree, family: str = "llama") -> Tree:
    """Replace the names in braces by files of a family."""

    def value(item: Any) -> Any:
        if isinstance(item, dict):
            return resolved_tree(item, family)
        if isinstance(item, list):
            return [value(part) for part in item]
        return resolved(item, family) if isinstance(item, str) else item

    return {name: value(item) for name, item in tree.items()}


def draw(
    scorer: str | None, wrapper: str | None, outer: str | None, schedule: str, codec: str | None, selector: str | None,
    rng: random.Random,
) -> str | None:  # fmt: skip
    """Draw a spec of these methods; None where they cannot be composed, or only with settings that were not drawn."""
    for _ in range(3):
        trees = [] if scorer is None else evicting(scorer, wrapper, outer, schedule, rng)
        trees += [settings_for(name, rng) for name in (codec, selector) if name is not None]
        if is_spec(trees or [{"name": "none"}]):
            return text_of(resolved_tree(composed(trees or [{"name": "none"}])))
    return None
