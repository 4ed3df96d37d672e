# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments; each error names the value, the allowed range and the fix."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
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
            kind = "an integer" if self.whole else "a number"
            raise TypeError(f"{name} must be {kind} {self}, got {value!r} of type {type(value).__name__}")
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


def is_ours(kind: type) -> bool:
    """Whether a class is defined in this library."""
    return kind.__module__.split(".")[0] == "kvpress"


def check_attributes(kind: type) -> None:
    """Check that no attribute of a class hides a read-only property or a method of this library.

    Properties may be overridden by properties, and methods by methods.

    Raises:
        TypeError: an attribute or a field has such a name.
    """
    for name in {*vars(kind), *inspect.get_annotations(kind)}:
        base = _reserving(kind.__mro__[1:], name)
        if base is None:
            continue
        attribute = vars(kind).get(name)
        if isinstance(vars(base)[name], property):
            is_override = hasattr(attribute, "__get__") and not inspect.isfunction(attribute)
        else:
            is_override = inspect.isroutine(attribute) or callable(attribute)
        if not is_override:
            raise TypeError(_hidden(kind, base, name))


def check_assignment(press: Any, name: str) -> None:
    """Check that an attribute that is assigned to a press hides no read-only property or method of this library.

    Raises:
        AttributeError: it has such a name.
    """
    base = _reserving(type(press).__mro__, name)
    if base is not None:
        raise AttributeError(_hidden(type(press), base, name))


def _reserving(bases: Sequence[type], name: str) -> type | None:
    """Return the class of this library that `bases` inherit a read-only property or method from; None without one."""
    base = next((base for base in bases if name in vars(base)), None)
    if base is None or not is_ours(base):
        return None
    attribute = vars(base)[name]
    is_reserved = attribute.fset is None if isinstance(attribute, property) else inspect.isroutine(attribute)
    return base if is_reserved else None


def _hidden(kind: type, base: type, name: str) -> str:
    noun = "read-only property" if isinstance(vars(base)[name], property) else "method"
    return (
        f"{name!r} of {kind.__name__} is a {noun} of {base.__name__}: give the attribute another name, or override the "
        f"{noun.split()[-1]} in the class"
    )


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
