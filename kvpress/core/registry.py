# SPDX-License-Identifier: Apache-2.0
"""Registry of presses by name, with role, paper, examples and refusals.

A press registers itself when its module is imported: `load` imports every module of `kvpress.presses`, `kvpress.quant` and
`kvpress.sparse`. Other packages add presses by an entry point of the group `kvpress.presses` that names a module.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar

Role = Literal["baseline", "evict", "budget", "schedule", "quantise", "select", "prefill"]
Status = Literal["recommended", "reproduction", "experimental"]
PressT = TypeVar("PressT", bound="type[Any]")

PACKAGES = ("kvpress.presses", "kvpress.quant", "kvpress.sparse")
ORDER = ("baseline", "evict", "budget", "schedule", "quantise", "select", "prefill")
STATUSES: dict[Status, str] = {
    "recommended": "a first choice, which our own measurements support",
    "reproduction": "a published method, for comparison",
    "experimental": "no publication, and few measurements",
}
"""Meaning of each status."""
GROUP = "kvpress.presses"
"""Group of entry points by which other packages add presses."""
EVERY_SUITE = "every suite"
NAME = r"[A-Za-z][\w-]*"
"""Pattern of the name of a press."""


@dataclass(frozen=True)
class Refusal:
    """A spec that raises an error when it is parsed, when it gets a model, or in a later turn."""

    spec: str
    """Refused spec."""
    why: str
    """Reason, for the docs."""


@dataclass(frozen=True)
class Exemption:
    """A test suite of all evicting presses that skips a press."""

    suite: str
    """Name of the suite; `EVERY_SUITE` for all of them."""
    why: str
    """Reason, and the tests that take the place of the suite."""
    settings: str = ""
    """Settings that are exempt; empty for all."""


@dataclass(frozen=True)
class Entry:
    """A registered press."""

    name: str
    """Public name, used in specs."""
    press: type[Any]
    """Class of the press."""
    role: Role
    """Kind of compression, by which lists are sorted."""
    paper: str
    """Paper that the press implements; empty for none."""
    example: str
    """Spec that parses without any file."""
    cases: tuple[str, ...] = ()
    """Specs for prompts of a few dozen tokens, which the test suites of all presses run."""
    needs: str = ""
    """File or folder that must be made for a model before the press can run."""
    refuses: tuple[Refusal, ...] = ()
    """Specs that the press refuses."""
    exempt: tuple[Exemption, ...] = ()
    """Test suites that skip the press."""
    status: Status = "experimental"
    """Evidence for the press, one of `STATUSES`."""

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
    status: Status | None = None,
) -> Callable[[PressT], PressT]:
    """Return a class decorator that makes a press available as `get_press(name)` and in `kvpress list`.

    Without `status`, a press with a paper is a reproduction, and a press without one is experimental.

    Raises:
        ValueError: another class has the name already, no spec can contain the name, or the role or the status is unknown.
    """
    if re.fullmatch(NAME, name) is None:
        raise ValueError(f"name must be letters, digits, _ and -, a letter first, as specs contain it, got {name!r}")
    if role not in ORDER:
        raise ValueError(f"role must be one of {', '.join(ORDER)}, got {role!r} for {name!r}")
    if status is not None and status not in STATUSES:
        raise ValueError(f"status must be one of {', '.join(STATUSES)}, got {status!r} for {name!r}")

    def decorate(press: PressT) -> PressT:
        key = normalise(name)
        if key in _entries and _entries[key].press is not press:
            raise ValueError(
                f"a press named {name!r} exists already: {_entries[key].press.__name__}; choose another name"
            )
        _entries[key] = Entry(
            name, press, role, paper, example or name, cases, needs, refuses, exempt, status or default_status(paper)
        )
        return press

    return decorate


def default_status(paper: str) -> Status:
    """Return the status of a press that is registered without one."""
    return "reproduction" if paper else "experimental"


def normalise(name: str) -> str:
    """Fold case, dashes and underscores, and a trailing `press`: `StreamingLLMPress` is `streaming_llm`."""
    folded = name.lower().replace("-", "").replace("_", "")
    return folded.removesuffix("press") if folded != "press" else folded


def entries() -> list[Entry]:
    """Return all registered presses, sorted by role and name."""
    return sorted(_all().values(), key=lambda entry: (ORDER.index(entry.role), entry.name))


def registered() -> bool:
    """Whether any press is registered so far; imports nothing."""
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
    """Import the modules that installed packages name in entry points, once; a failed import gives a warning."""
    for point in entry_points(group=GROUP):
        try:
            point.load()
        except Exception as error:
            warnings.warn(
                f"cannot import the presses of {point.value!r} ({GROUP}, entry point {point.name!r}): {error}",
                stacklevel=2,
            )


def class_named(name: str, package: str = "kvpress") -> type[Any]:
    """Return the press class called `name`, for attribute access on a package.

    Raises:
        AttributeError: no registered class of this library has the name.
    """
    if name[:1].isupper():
        for entry in entries():
            for base in entry.press.__mro__:
                if base.__name__ == name and base.__module__.startswith("kvpress."):
                    return base
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


def find(name: str) -> Entry:
    """Return the entry of a public name or class name.

    Raises:
        UnknownNameError: no press has the name; the message suggests the nearest one.
    """
    presses, key = _all(), normalise(name)
    entry = presses.get(key) or next((e for e in presses.values() if normalise(e.press.__name__) == key), None)
    if entry is None:
        close = nearest(name, {entry.name for entry in presses.values()})
        raise UnknownNameError(f"unknown press {name!r}{close}; `kvpress list` shows all")
    return entry


def name_of(press: type[Any]) -> str:
    """Return the public name of a press class.

    Raises:
        KeyError: the class is not registered.
    """
    for entry in _all().values():
        if entry.press is press:
            return entry.name
    raise KeyError(f"{press.__name__} is not registered; decorate it with @kvpress.register(name, role)")


NEAR = 0.75
"""Least similarity of a suggested name; that of `nonsense` and `none` is 0.67."""


class UnknownNameError(KeyError):
    """`KeyError` that prints its message without quotes."""

    def __str__(self) -> str:
        return str(self.args[0])


def nearest(name: str, names: Iterable[str]) -> str:
    """Return `: did you mean ...?` for the closest of `names`, or an empty text if none is close."""
    folded = {normalise(candidate): candidate for candidate in names}
    key = normalise(name)
    close = difflib.get_close_matches(key, folded, n=1, cutoff=NEAR) or [
        candidate for candidate in folded if _one_letter_off(key, candidate)
    ]
    return f": did you mean {folded[close[0]]}?" if close else ""


def _one_letter_off(name: str, candidate: str) -> bool:
    """Whether two names differ in one letter; in short names that is too much for `NEAR`."""
    return len(name) == len(candidate) > 2 and sum(a != b for a, b in zip(name, candidate, strict=True)) == 1
