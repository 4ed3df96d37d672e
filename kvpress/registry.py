"""The names under which presses are found."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from kvpress.facts import FACTS, Facts

Role = Literal["baseline", "evict", "budget", "schedule", "quantise", "select"]
PressT = TypeVar("PressT", bound="type[Any]")

PACKAGES = ("kvpress.presses", "kvpress.quant", "kvpress.sparse")


@dataclass(frozen=True)
class Entry:
    """A registered press: its public name, class, role and the paper it follows."""

    name: str
    press: type[Any]
    role: Role
    paper: str

    @property
    def summary(self) -> str:
        """First line of the docstring."""
        return (self.press.__doc__ or "").strip().splitlines()[0]

    @property
    def facts(self) -> Facts:
        """What the class does not say; of presses registered elsewhere only the name is known."""
        return FACTS.get(self.name, Facts(self.name))


_entries: dict[str, Entry] = {}


def register(name: str, role: Role, paper: str = "") -> Callable[[PressT], PressT]:
    """Class decorator: make a press available as `get_press(name)` and in `kvpress list`."""

    def decorate(press: PressT) -> PressT:
        key = normalise(name)
        if key in _entries and _entries[key].press is not press:
            raise ValueError(f"a press named {name!r} exists already: {_entries[key].press.__name__}")
        _entries[key] = Entry(name, press, role, paper)
        return press

    return decorate


def normalise(name: str) -> str:
    """Fold case, dashes and underscores, and a trailing `press`: `StreamingLLMPress` is `streaming_llm`."""
    folded = name.lower().replace("-", "").replace("_", "")
    return folded.removesuffix("press") if folded != "press" else folded


def entries() -> list[Entry]:
    """All registered presses, by role and name."""
    _load()
    order = ["baseline", "evict", "budget", "schedule", "quantise", "select"]
    return sorted(_entries.values(), key=lambda entry: (order.index(entry.role), entry.name))


def find(name: str) -> Entry:
    """Return the entry of a name, or of a class name; an unknown one is a `KeyError` that names the nearest."""
    _load()
    key = normalise(name)
    entry = _entries.get(key) or next((e for e in _entries.values() if normalise(e.press.__name__) == key), None)
    if entry is None:
        known = {entry.name for entry in _entries.values()}
        raise UnknownNameError(f"unknown press {name!r}{nearest(name, known)}; `kvpress list` shows all")
    return entry


def name_of(press: type[Any]) -> str:
    """Return the public name of a press class."""
    _load()
    for entry in _entries.values():
        if entry.press is press:
            return entry.name
    raise KeyError(f"{press.__name__} is not registered; decorate it with @kvpress.register(name, role)")


class UnknownNameError(KeyError):
    """A `KeyError` that prints its message as it is, without quotes."""

    def __str__(self) -> str:
        return str(self.args[0])


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `, did you mean ...?` for the closest known name, or nothing."""
    folded = {normalise(candidate): candidate for candidate in known}
    match = difflib.get_close_matches(normalise(name), folded, n=1, cutoff=0.5)
    return f": did you mean {folded[match[0]]}?" if match else ""


def _load() -> None:
    for package in PACKAGES:
        importlib.import_module(package)
