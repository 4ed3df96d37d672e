# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments; each error names the value, the allowed range and the fix."""

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
    """Range of numbers that an argument allows."""

    least: float
    """Lower limit."""
    most: float = math.inf
    """Upper limit."""
    whole: bool = False
    """Only integers."""
    above: bool = False
    """Excludes the lower limit."""
    below: bool = False
    """Excludes the upper limit."""
    odd: bool = False
    """Only odd integers."""

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"{'>' if self.above else '>='} {self.least}"
        return f"in {'(' if self.above else '['}{self.least}, {self.most}{')' if self.below else ']'}"

    def check(self, name: str, value: Any) -> None:
        """Check a value.

        Raises:
            TypeError: it is not a number, or not an integer where `whole` is set.
            ValueError: it is out of range.
        """
        if isinstance(value, bool) or not isinstance(value, int if self.whole else (int, float)):
            kind = "whole number" if self.whole else "number"
            raise TypeError(f"{name} must be a {kind} {self}, got {value!r} of type {type(value).__name__}")
        is_above = self.least < value if self.above else self.least <= value
        if not (is_above and (value <= self.most if self.most < math.inf and not self.below else value < self.most)):
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
"""Annotations of dataclass fields, from `Count` to `Ratio`, whose ranges `check_fields` checks."""


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Check that a size is an integer of at least `least`."""
    Range(least, whole=True).check(name, value)


def check_fields(settings: Any) -> None:
    """Check the fields of a dataclass whose type is a range of numbers, a `Literal` or a bool, each with None if allowed.

    Raises:
        TypeError, ValueError: the type of a field does not allow its value.
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
    """Return the alternatives that the type of each field of a dataclass allows: types, `Literal`s and ranges, by name."""
    try:
        hints = get_type_hints(settings, include_extras=True)
    except NameError:  # annotations of a user's class may refer to local names
        return allowed(settings.__mro__[1])
    alternatives = {}
    for name in (field.name for field in fields(settings) if field.name in hints):
        hint = hints[name]
        choices = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        alternatives[name] = tuple(c.__metadata__[0] if get_origin(c) is Annotated else c for c in choices)
    return alternatives


def check_finite(keys: Tensor, values: Tensor, layer: int, source: str = "") -> None:
    """Check the keys and values that a layer is about to compress for NaN.

    Raises:
        FloatingPointError: the message names the tensor, its `source`, layer, row, head and token.
    """
    for name, tensor in (("keys", keys), ("values", values)):
        is_nan = torch.isnan(tensor)
        if bool(is_nan.any()):
            row, head, slot = is_nan.any(dim=-1).nonzero()[0].tolist()
            raise FloatingPointError(
                f"NaN in {name} {source + ' ' if source else ''}of layer {layer}, row {row}, head {head}, token {slot}"
            )
