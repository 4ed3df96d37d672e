# SPDX-License-Identifier: Apache-2.0
"""Hooks and method replacements that are not copied with a model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from torch import nn


class Hook(partial[Any]):
    """Hook that becomes a no-op in copies of its module."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (nothing,)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing, as the hook in a copy of a model."""


class Replaced:
    """Replacement of the method `name` of a module: calls `act` with the method. Copies of the module get the method."""

    def __init__(self, owner: nn.Module, name: str, act: Callable[..., Any]) -> None:
        self.owner, self.name, self.act = owner, name, act
        self.before = getattr(owner, name)
        update_wrapper(self, self.before, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.act(self.before, *args, **kwargs)

    def put(self) -> Callable[[], None]:
        """Replace the method; returns a function that restores it."""
        attributes = self.owner.__dict__
        previous = {self.name: attributes[self.name]} if self.name in attributes else {}

        def undo() -> None:
            attributes.pop(self.name, None)
            attributes.update(previous)

        attributes[self.name] = self
        return undo

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.before, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)
