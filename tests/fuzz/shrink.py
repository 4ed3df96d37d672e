# SPDX-License-Identifier: Apache-2.0
"""Make a failing case smaller by dropping everything that the fault does not depend on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tests.fuzz import specs
from tests.fuzz.cases import Case
from tests.fuzz.properties import run
from tests.fuzz.specs import Tree

PLAIN = {"turns": "1", "beams": 1, "chunk": 0, "rows": "one", "dtype": "float32", "family": "llama", "check": "repeat"}


def shrunk(case: Case, kind: str, tries: int = 60) -> Case:
    """Return a smaller case with a fault of the same kind, after at most `tries` runs."""
    done = False
    while not done:
        done = True
        for smaller in _smaller(case):
            tries -= 1
            if tries < 0:
                return case
            if any(fault.kind == kind for fault in run(smaller)):
                case, done = smaller, False
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yield cases with one part removed, the largest steps first."""
    for tree in _trees(specs.tree_of(case.spec)):
        if specs.is_spec([tree]):
            yield replace(case, spec=specs.text_of(tree))
    for name, value in PLAIN.items():
        needs = {("check", "repeat"), ("rows", "one")} if case.check == "alone" else set()
        needs |= {("turns", "1")} if case.check == "copy" else set()
        needs |= {("chunk", 0)} if case.check == "chunks" else set()
        if getattr(case, name) != value and (name, value) not in needs:
            yield replace(case, **{name: value})
    if case.rows in ("padded", "long"):
        yield replace(case, rows="even")
    if case.rows == "padded":
        yield replace(case, rows="short")
    if case.turns in ("3", "long", "reading"):
        yield replace(case, turns="2")


def _trees(tree: Tree) -> Iterator[Tree]:
    """Yield the spec without one of its presses, without a wrapper or schedule, or with a default instead of a setting."""
    parts = specs.parts_of(tree)
    if len(parts) > 1:
        for at in range(len(parts)):
            yield specs.composed(parts[:at] + parts[at + 1 :])
    for at, part in enumerate(parts):
        for smaller in _parts(part):
            yield specs.composed([*parts[:at], smaller, *parts[at + 1 :]])


def _parts(part: Tree) -> Iterator[Tree]:
    inner_presses = {name: value for name, value in part.items() if isinstance(value, dict)}
    for inner in inner_presses.values():
        # A press inside a schedule has no ratio of its own.
        plain = "compression_ratio" in specs.fields_of(inner) and not {"compression_ratio", "budget"} & set(inner)
        yield {**inner, "compression_ratio": 0.5} if plain else inner
    if specs.place_of(part) in SIMPLEST:
        simplest = specs.tree_of(SIMPLEST[specs.place_of(part)])
        if simplest["name"] != part["name"]:
            yield simplest
    for name, inner in inner_presses.items():
        for smaller in _parts(inner):
            yield {**part, name: smaller}
    for name in part:
        if name in DROPPED:
            yield {key: value for key, value in part.items() if key != name}


SIMPLEST = {
    "scorer": "knorm:0.5",
    "codec": "kivi:group_size=4,residual_length=4",
    "selector": "quest:budget=12,page_size=4,skip_layers=0",
}
"""Replacement for a method, by its place."""
DROPPED = (
    "normalize", "use_covariance", "use_vnorm", "kernel_size", "n_sink", "statistic", "reduce", "heads", "sinks", "backbone",
    "target_ratio", "alpha_safeguard", "kvzip_plus_normalization", "layerwise", "low_bits", "recent_ratio", "n_recent",
    "generated_rank", "offload", "beta", "hidden_states_buffer_size", "rank",
)  # fmt: skip
"""Settings whose default suits short prompts."""
