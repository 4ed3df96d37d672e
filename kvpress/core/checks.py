# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments; each error names the value, what is allowed and the fix."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor


@dataclass(frozen=True)
class Range:
    """Numbers that an argument may be: from `least` to `most`, without these where they are `above` or `below` all of them.

    With `odd`, only odd ones of these.
    """

    least: float
    most: float = math.inf
    whole: bool = False
    above: bool = False
    below: bool = False
    odd: bool = False

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"{'>' if self.above else '>='} {self.least}"
        return f"in {'(' if self.above else '['}{self.least}, {self.most}{')' if self.below else ']'}"

    def check(self, name: str, value: Any) -> None:
        """Refuse what is no such number."""
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            kind = "whole number" if self.whole else "number"
            raise TypeError(f"{name} must be a {kind} {self}, got {value!r} of type {type(value).__name__}")
        above = self.least < value if self.above else self.least <= value
        if not (above and (value <= self.most if self.most < math.inf and not self.below else value < self.most)):
            raise ValueError(f"{name} must be {self}, got {value}")
        if self.odd and value % 2 == 0:
            raise ValueError(f"{name} must be odd, got {value}")


Count = Annotated[int, Range(1, whole=True)]
Odd = Annotated[int, Range(1, whole=True, odd=True)]
Size = Annotated[int, Range(0, whole=True)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
RATIO = Range(0, 1, below=True)
Ratio = Annotated[float, RATIO]
"""Types of fields: `check_fields` refuses what is outside."""


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Check that a size is a whole number of at least `least`."""
    Range(least, whole=True).check(name, value)


def check_fields(settings: Any) -> None:
    """Check every field of a dataclass that is a number in a range, one of some words, or a switch, and None where allowed.

    Raises:
        TypeError, ValueError: a value is none of those that the type of its field allows.
    """
    kind: type = type(settings)
    for name, choices in allowed(kind).items():
        value = getattr(settings, name)
        if value is None and type(None) in choices:
            continue
        for choice in choices:
            if isinstance(choice, Range):
                choice.check(name, value)
            elif get_origin(choice) is Literal and value not in get_args(choice):
                *first, last = map(repr, get_args(choice))
                raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}")
        if choices == (bool,) and not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}")


@cache
def allowed(settings: type) -> dict[str, tuple[Any, ...]]:
    """Return what the fields of a dataclass may be, by name: types, choices and ranges, any of them."""
    try:
        hints = get_type_hints(settings, include_extras=True)
    except NameError:  # a user's class names what cannot be found from here
        return allowed(settings.__mro__[1])
    found = {}
    for name in (field.name for field in fields(settings) if field.name in hints):
        hint = hints[name]
        choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        found[name] = tuple(c.__metadata__[0] if get_origin(c) is Annotated else c for c in choices)
    return found


def check_finite(keys: Tensor, values: Tensor, layer: int, source: str = "") -> None:
    """Refuse NaN in the keys and values that a layer is about to compress, naming the place and the `source`."""
    for name, tensor in (("keys", keys), ("values", values)):
        bad = torch.isnan(tensor)
        if bool(bad.any()):
            row, head, slot = bad.any(dim=-1).nonzero()[0].tolist()
            raise FloatingPointError(
                f"NaN in {name} {source + ' ' if source else ''}of layer {layer}, row {row}, head {head}, token {slot}"
            )
