# SPDX-License-Identifier: Apache-2.0
"""Hooks and stand-ins for methods that copies of a model do not have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

from torch import nn


class Hook(partial[Any]):
    """A hook that copies of its module do not have."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (nothing,)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: a hook in the copy of a model."""


class Replaced:
    """Stands in for the method `name` of a module: calls `act` with it. Copies of the module have the method itself."""

    def __init__(self, owner: nn.Module, name: str, act: Callable[..., Any]) -> None:
        self.owner, self.name, self.act = owner, name, act
        self.before = getattr(owner, name)
        update_wrapper(self, self.before, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.act(self.before, *args, **kwargs)

    def put(self) -> Callable[[], None]:
        """Take the place of the method; returns what undoes it."""
        attributes = self.owner.__dict__
        own = {self.name: attributes[self.name]} if self.name in attributes else {}

        def undo() -> None:
            attributes.pop(self.name, None)
            attributes.update(own)

        attributes[self.name] = self
        return undo

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.before, memo)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)
