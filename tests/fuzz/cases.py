"""A case: a spec, what it is tried on, and the property that must hold. One line of text, from which it runs again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from tests.fuzz.models import DTYPES, FAMILIES
from tests.fuzz.specs import draw, inside, names, schedules, seeded, tree_of
from tests.pairwise import pairwise

ROWS = {"one": (97,), "even": (70, 70), "padded": (90, 61, 23), "short": (86, 5), "long": (181, 140)}
"""Real tokens of each row of a first prompt; shorter rows are padded on the left."""
TURNS = ("1", "2", "3", "reading")
"""How many turns a conversation has; `reading`: a second one, inside `kvpress.reading`."""


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


@cache
def _possible(scorer: str | None, wrapper: Any, outer: Any, schedule: str, codec: Any, selector: Any) -> bool:
    if scorer is None and (wrapper, outer, schedule) != (None, None, "ratio"):
        return False
    if outer is not None and wrapper in (None, outer):
        return False
    return draw(scorer, wrapper, outer, schedule, codec, selector, seeded(0)) is not None


def allowed(row: dict[str, Any]) -> bool:
    """Whether a row, or one in the making, makes sense."""
    if row.get("check") == "alone" and row.get("rows") == "one":
        return False
    if row.get("check") == "select_all" and row.get("selector", "quest") is None:
        return False
    if row.get("check") == "beside" and row.get("scorer", "knorm") is None:
        return False
    if row.get("check") == "chunks" and row.get("chunk", 7) == 0:
        return False
    if row.get("check") == "copy" and row.get("turns") == "1":
        return False
    simple = row.get("schedule", "ratio") if row.get("scorer", "") is not None else "ratio"
    scorer, wrapper = row.get("scorer", "knorm"), row.get("wrapper")
    if "wrapper" not in row and row.get("outer") is not None:
        return scorer is not None and any(
            _possible(scorer, name, row["outer"], simple, None, None) for name in names("wrapper")
        )
    if scorer is None and row.get("schedule", "ratio") != "ratio":
        return False
    codec, selector = row.get("codec"), row.get("selector")
    return _possible(scorer, wrapper, row.get("outer"), simple, codec, selector)


def case_of(row: dict[str, Any], seed: int) -> Case:
    """Draw the settings of a row."""
    names = ("scorer", "wrapper", "outer", "schedule", "codec", "selector")
    spec = draw(*(row[name] for name in names), seeded(seed))
    if spec is None:
        raise ValueError(f"no spec of {row} is possible")
    return Case(spec, **{name: value for name, value in row.items() if name not in names}, seed=seed)


COUNT = 360
"""Cases of CI."""


@cache
def ci_cases() -> list[Case]:
    """The cases of CI: every two values of different dimensions meet, and some more at random."""
    pairs = [case_of(row, seed) for seed, row in enumerate(pairwise(allowed, **dimensions()))]
    return [*pairs, *itertools.islice(random_cases(0), COUNT - len(pairs))]


def random_cases(seed: int) -> Iterator[Case]:
    """Draw cases without end."""
    rng, known = seeded(seed), dimensions()
    while True:
        row = {name: rng.choice(values) for name, values in known.items()}
        # A second wrapper is rarer than one, and one rarer than none.
        row["outer"] = row["outer"] if rng.random() < 0.3 else None
        if not allowed(row):
            continue
        yield case_of(row, rng.randrange(1_000_000))


def reaches(case: Case) -> set[str]:
    """Names of all presses in a case."""
    return {tree["name"] for tree in inside(tree_of(case.spec))}
