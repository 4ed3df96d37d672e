# SPDX-License-Identifier: Apache-2.0
"""A case: a spec, what it is tried on, and the property that must hold. One line of text, from which it runs again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from itertools import cycle
from typing import Any

from tests.fuzz.models import DTYPES, FAMILIES
from tests.fuzz.specs import draw, encodes, inside, names, rewrites, schedules, seeded, tree_of
from tests.pairwise import pairwise

ROWS = {"one": (97,), "even": (70, 70), "padded": (90, 61, 23), "short": (86, 5), "long": (181, 140)}
"""Real tokens of each row of a first prompt; shorter rows are padded on the left."""
TURNS = ("1", "2", "3", "long", "reading")
"""How many turns a conversation has; `long`: three, of dozens of tokens; `reading`: a second one, inside `kvpress.reading`."""


@dataclass(frozen=True)
class Case:
    """One trial; `seed` makes the tokens."""

    spec: str
    family: str = "llama"
    dtype: str = "float32"
    rows: str = "one"
    chunk: int = 0
    turns: str = "1"
    beams: int = 1
    check: str = "repeat"
    seed: int = 0

    def __str__(self) -> str:
        settings = [f"{field.name}={getattr(self, field.name)}" for field in fields(self) if field.name != "spec"]
        return f"{' '.join(settings)} :: {self.spec}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read what `str` writes; what is not named keeps its default."""
        settings, _, spec = text.rpartition("::")
        found: dict[str, Any] = dict(item.split("=") for item in settings.split())
        for name in {"chunk", "beams", "seed"} & set(found):
            found[name] = int(found[name])
        return cls(spec.strip(), **found)


CHECKS = ("repeat", "copy", "keep_all", "alone", "select_all", "beside", "chunks")
"""Properties by name, see `tests.fuzz.properties`; bytes and kept pairs are looked at in every case."""


def dimensions() -> dict[str, list[Any]]:
    """Everything that is drawn, by name."""
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
"""The dimensions that a spec is drawn from; the others say what it is tried on."""


def allowed(row: dict[str, Any]) -> bool:
    """Whether a row, or one in the making, makes sense."""
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
"""Cases of CI: three of each trial that `ci_cases` draws specs for."""


@cache
def ci_cases() -> list[Case]:
    """The cases of CI: every two values of what specs are tried on meet, and methods of a place are drawn equally often."""
    known = dimensions()
    trials = pairwise(allowed, **{name: values for name, values in known.items() if name not in SPEC})
    found, codecs, selectors = [], cycle(known["codec"]), cycle(names("selector"))
    for seed in range(COUNT):
        given = {**trials[seed % len(trials)], "scorer": known["scorer"][seed % len(known["scorer"])]}
        if seed % 2 and not (given["scorer"] and (rewrites(given["scorer"]) or encodes(given["scorer"]))):
            given["codec"] = next(codecs)
        if seed % 4 == 0 and not (given["scorer"] and rewrites(given["scorer"])):
            given["selector"] = next(selectors)
        found.append(next(_cases(seeded(seed), given)))
    return found


def random_cases(seed: int) -> Iterator[Case]:
    """Draw cases without end."""
    return _cases(seeded(seed), {})


def _cases(rng: random.Random, given: dict[str, Any]) -> Iterator[Case]:
    """Draw cases with the given values."""
    known = dimensions()
    while True:
        row = {name: given.get(name, rng.choice(values)) for name, values in known.items()}
        for name, share in (("outer", 0.3), ("codec", 0.5), ("selector", 0.5)):
            row[name] = row[name] if name in given or rng.random() < share else None
        if given.get("check") == "beside" and row["scorer"] is None:
            row["scorer"] = "knorm"
        if any(encodes(row[name]) for name in ("scorer", "wrapper", "outer") if row[name] is not None):
            row["codec"] = None
        if row["scorer"] is not None and rewrites(row["scorer"]):
            # What it changes must stay dense: there is nothing that a codec or selector could be tried on.
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
    """Names of all presses in a case."""
    return {tree["name"] for tree in inside(tree_of(case.spec))}
