# SPDX-License-Identifier: Apache-2.0
"""The names under which presses are found, and what is known of each besides its class.

A method is found because its file is there: every module of `kvpress.presses`, `kvpress.quant` and `kvpress.sparse` is
looked through. Other packages add theirs by an entry point of the group `kvpress.presses` that names a module.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar

Role = Literal["baseline", "evict", "budget", "schedule", "quantise", "select", "prefill"]
PressT = TypeVar("PressT", bound="type[Any]")

PACKAGES = ("kvpress.presses", "kvpress.quant", "kvpress.sparse")
ORDER = ("baseline", "evict", "budget", "schedule", "quantise", "select", "prefill")
GROUP = "kvpress.presses"
"""The group of entry points by which other packages add presses."""
EVERY_SUITE = "every suite"


@dataclass(frozen=True)
class Refusal:
    """A spec that is refused, when it is parsed, when it meets a model or in a later turn, and why."""

    spec: str
    why: str


@dataclass(frozen=True)
class Exemption:
    """A suite of all evicting presses that one does not take part in, and what tests it instead.

    Of `EVERY_SUITE` the whole press is left out. `settings` are those that alone are exempt.
    """

    suite: str
    why: str
    settings: str = ""


@dataclass(frozen=True)
class Entry:
    """A registered press: its public name, class, role and the paper it follows.

    `example` is a spec that parses everywhere, `cases` are specs for prompts of a few dozen tokens, which the suites of all
    presses run over. `needs` is what has to be made for a model before the press suits it.
    """

    name: str
    press: type[Any]
    role: Role
    paper: str
    example: str
    cases: tuple[str, ...] = ()
    needs: str = ""
    refuses: tuple[Refusal, ...] = ()
    exempt: tuple[Exemption, ...] = ()

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (self.press.__doc__ or "").strip().splitlines()[0]


_entries: dict[str, Entry] = {}


def register(
    name: str,
    role: Role,
    paper: str = "",
    *,
    example: str = "",
    cases: tuple[str, ...] = (),
    needs: str = "",
    refuses: tuple[Refusal, ...] = (),
    exempt: tuple[Exemption, ...] = (),
) -> Callable[[PressT], PressT]:
    """Class decorator: make a press available as `get_press(name)` and in `kvpress list`."""

    def decorate(press: PressT) -> PressT:
        key = normalise(name)
        if key in _entries and _entries[key].press is not press:
            raise ValueError(f"a press named {name!r} exists already: {_entries[key].press.__name__}")
        _entries[key] = Entry(name, press, role, paper, example or name, cases, needs, refuses, exempt)
        return press

    return decorate


def normalise(name: str) -> str:
    """Fold case, dashes and underscores, and a trailing `press`: `StreamingLLMPress` is `streaming_llm`."""
    folded = name.lower().replace("-", "").replace("_", "")
    return folded.removesuffix("press") if folded != "press" else folded


def entries() -> list[Entry]:
    """All registered presses, by role and name."""
    return sorted(_all().values(), key=lambda entry: (ORDER.index(entry.role), entry.name))


def registered() -> bool:
    """Whether any press is registered so far, without looking for more."""
    return bool(_entries)


def _all() -> dict[str, Entry]:
    """Return all registered presses by their folded names."""
    for package in PACKAGES:
        load(package)
    load_installed()
    return _entries


@functools.cache
def load(package: str) -> None:
    """Import every module of a package, once."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        importlib.import_module(f"{package}.{module.name}")


@functools.cache
def load_installed() -> None:
    """Import the modules that installed packages name as theirs, once; one that fails costs a warning and its presses."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            warnings.warn(
                f"the presses of {point.value!r} ({GROUP}, entry point {point.name!r}) are missing: {error}",
                stacklevel=2,
            )


def class_named(name: str, package: str = "kvpress") -> type[Any]:
    """Return the press class of that name, as an attribute of a package; an unknown one is an AttributeError."""
    if name[:1].isupper():
        for entry in entries():
            for base in entry.press.__mro__:
                if base.__name__ == name and base.__module__.startswith("kvpress."):
                    return base
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


def find(name: str) -> Entry:
    """Return the entry of a name, or of a class name; an unknown one is a `KeyError` that names the nearest."""
    known, key = _all(), normalise(name)
    entry = known.get(key) or next((e for e in known.values() if normalise(e.press.__name__) == key), None)
    if entry is None:
        close = nearest(name, {entry.name for entry in known.values()})
        raise UnknownNameError(f"unknown press {name!r}{close}; `kvpress list` shows all")
    return entry


def name_of(press: type[Any]) -> str:
    """Return the public name of a press class."""
    for entry in _all().values():
        if entry.press is press:
            return entry.name
    raise KeyError(f"{press.__name__} is not registered; decorate it with @kvpress.register(name, role)")


NEAR = 0.75
"""Similarity from which on a name is offered for another; `nonsense` and `none` have 0.67."""


class UnknownNameError(KeyError):
    """A `KeyError` that prints its message as it is, without quotes."""

    def __str__(self) -> str:
        return str(self.args[0])


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean ...?` for the closest known name, or nothing."""
    folded = {normalise(candidate): candidate for candidate in known}
    key = normalise(name)
    near = difflib.get_close_matches(key, folded, n=1, cutoff=NEAR) or [
        one for one in folded if _one_letter_off(key, one)
    ]
    return f": did you mean {folded[near[0]]}?" if near else ""


def _one_letter_off(name: str, other: str) -> bool:
    """Whether two names differ in a single letter, which in a short name is a large part of it."""
    return len(name) == len(other) > 2 and sum(a != b for a, b in zip(name, other, strict=True)) == 1
