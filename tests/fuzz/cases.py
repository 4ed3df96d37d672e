# SPDX-License-Identifier: Apache-2.0
"""A case: a spec, the model and conversation that it is tried on, and the property that must hold, as one line of text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from itertools import cycle
from typing import Any

from tests.fuzz.models import DTYPES, FAMILIES
from tests.fuzz.specs import draw, encodes, inside, methods, names, rewrites, schedules, seeded, tree_of
from tests.pairwise import pairwise

ROWS = {"one": (97,), "even": (70, 70), "padded": (90, 61, 23), "short": (86, 5), "long": (181, 140)}
"""Real tokens of each row of a first prompt; shorter rows are padded on the left."""
TURNS = ("1", "2", "3", "long", "reading")
"""Number of turns of a conversation; `long`: three, of dozens of tokens; `reading`: a second one, inside `kvpress.reading`."""


@dataclass(frozen=True)
class Case:
    """One trial."""

    spec: str
    """Press."""
    family: str = "llama"
    """Model, see `tests.fuzz.models`."""
    dtype: str = "float32"
    rows: str = "one"
    """Lengths of the rows, see `ROWS`."""
    chunk: int = 0
    """Length of a chunk of the prompt, 0 for one pass."""
    turns: str = "1"
    """Turns, see `TURNS`."""
    beams: int = 1
    """Beams of the last turn."""
    check: str = "repeat"
    """Property, see `CHECKS`."""
    seed: int = 0
    """Seed of the tokens."""

    def __str__(self) -> str:
        settings = [f"{field.name}={getattr(self, field.name)}" for field in fields(self) if field.name != "spec"]
        return f"{' '.join(settings)} :: {self.spec}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse the text of `str`; missing fields keep their default."""
        settings, _, spec = text.rpartition("::")
        values_by_field: dict[str, Any] = dict(item.split("=") for item in settings.split())
        for name in {"chunk", "beams", "seed"} & set(values_by_field):
            values_by_field[name] = int(values_by_field[name])
        return cls(spec.strip(), **values_by_field)


CHECKS = ("repeat", "copy", "keep_all", "alone", "select_all", "beside", "chunks")
"""Properties by name, see `tests.fuzz.properties`; bytes and kept pairs are checked in every case."""


def dimensions() -> dict[str, list[Any]]:
    """Return the values of everything that is drawn, by name."""
    return {
        "scorer": [*names("scorer"), None],
        "wrapper": [None, *names("wrapper")],
        "outer": [None, *names("wrapper")],
        "schedule": schedules(),
        "codec": [None, *names("codec")],
        "selector": [None, *names("selector")],
        "family": list(FAMILIES),
        "dtype": list(DTYPES),
        "rows": list(ROWS),
        "chunk": [0, 7, 32],
        "turns": list(TURNS),
        "beams": [1, 3],
        "check": list(CHECKS),
    }


SPEC = ("scorer", "wrapper", "outer", "schedule", "codec", "selector")
"""Dimensions that a spec is drawn from; the others describe the trial."""


def allowed(row: dict[str, Any]) -> bool:
    """Return whether a row, possibly incomplete, is a valid case."""
    needs = {"alone": ("rows", "one"), "copy": ("turns", "1"), "chunks": ("chunk", 0),
             "select_all": ("selector", None), "beside": ("scorer", None)}  # fmt: skip
    name, refused = needs.get(row.get("check", ""), ("", ""))
    if name in row and row[name] == refused:
        return False
    scorer, wrapper, outer = (row.get(name, "any") for name in ("scorer", "wrapper", "outer"))
    if scorer is None and (wrapper, outer, row["schedule"]) != (None, None, "ratio"):
        return False
    return outer is None or outer == "any" or wrapper not in (None, outer)


COUNT = 120
"""Number of CI cases: three of each trial that `ci_cases` draws specs for."""


@cache
def ci_cases() -> list[Case]:
    """Return the CI cases: every two values of the trial dimensions meet, and methods of a place are drawn equally often."""
    values_of = dimensions()
    trials = pairwise(allowed, **{name: values for name, values in values_of.items() if name not in SPEC})
    cases, codecs, selectors = [], cycle(values_of["codec"]), cycle(names("selector"))
    for seed in range(COUNT):
        fixed = {**trials[seed % len(trials)], "scorer": values_of["scorer"][seed % len(values_of["scorer"])]}
        if seed % 2 and not (fixed["scorer"] and (rewrites(fixed["scorer"]) or encodes(fixed["scorer"]))):
            fixed["codec"] = next(codecs)
        if seed % 4 == 0 and not (fixed["scorer"] and rewrites(fixed["scorer"])):
            fixed["selector"] = next(selectors)
        cases.append(next(_cases(seeded(seed), fixed)))
    # Wrappers and schedules are drawn at random: methods that no case has got take the place of the last cases.
    for number, name in enumerate(sorted(set(methods()) - {"none"} - set().union(*map(reaches, cases))), start=1):
        trial = trials[(COUNT - number) % len(trials)]
        cases[COUNT - number] = next(case for case in _cases(seeded(COUNT + number), trial) if name in reaches(case))
    return cases


def random_cases(seed: int) -> Iterator[Case]:
    """Draw cases without end."""
    return _cases(seeded(seed), {})


def _cases(rng: random.Random, fixed: dict[str, Any]) -> Iterator[Case]:
    """Draw cases with some values fixed."""
    values_of = dimensions()
    while True:
        row = {name: fixed.get(name, rng.choice(values)) for name, values in values_of.items()}
        for name, share in (("outer", 0.3), ("codec", 0.5), ("selector", 0.5)):
            row[name] = row[name] if name in fixed or rng.random() < share else None
        if fixed.get("check") == "beside" and row["scorer"] is None:
            row["scorer"] = "knorm"
        if any(encodes(row[name]) for name in ("scorer", "wrapper", "outer") if row[name] is not None):
            row["codec"] = None
        if row["scorer"] is not None and rewrites(row["scorer"]):
            # The pairs it changes must stay dense, which excludes codecs and selectors.
            row |= {
                "codec": None,
                "selector": None,
                "check": "repeat" if row["check"] == "select_all" else row["check"],
            }
        if not allowed(row):
            continue
        seed = rng.randrange(1_000_000)
        spec = draw(*(row.pop(name) for name in SPEC), seeded(seed))
        if spec is not None:
            yield Case(spec, **row, seed=seed)


def reaches(case: Case) -> set[str]:
    """Return the names of all presses in a case."""
    return {tree["name"] for tree in inside(tree_of(case.spec))}
