# SPDX-License-Identifier: Apache-2.0
"""Storage that segments of several layers refer to, so that its tensors are stored once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvpress.cache.storage import Held, Joint, RowChoice

SharedT = TypeVar("SharedT", bound="SharedHeld")


class SharedHeld(Held):
    """Storage of two layers: a part of a segment of each.

    Layers take rows, join and move their segments one after another. The layer that makes a change first leaves its result
    here, and the other layer gets the same storage if it makes the same change; after different changes, the layers hold
    copies. Copies of a cache share the storage itself.
    """

    def _once(self: SharedT, change: str, inputs: Sequence[Any], make: Callable[[], SharedT]) -> SharedT:
        """Return `make()`, or the result of the other layer if it made the same change to equal inputs before."""
        earlier = vars(self).pop("_result", None)
        if earlier is not None and earlier[0] == change and _equal(earlier[1], inputs):
            shared: SharedT = earlier[2]
            return shared
        result = make()
        vars(self)["_result"] = change, tuple(inputs), result
        return result

    def _take(self: SharedT, choice: RowChoice) -> SharedT:
        return self._once("take", [choice.rows, choice.layout.lengths], partial(super()._take, choice))

    def _join(self: SharedT, others: Sequence[SharedT], joint: Joint) -> SharedT:
        return self._once("join", [*others, joint.woven], partial(super()._join, others, joint))

    def placed(self: SharedT, tier: Any) -> SharedT:
        return self._once("place", [tier], partial(super().placed, tier))

    def moved(self: SharedT, device: torch.device | str, memo: dict[int, Any] | None = None) -> SharedT:
        return self._once("move", [str(device)], partial(super().moved, device, memo))

    def _move(self: SharedT, moves: Tensor) -> SharedT:
        del moves
        return self  # slots are those of the segments

    def __deepcopy__(self: SharedT, memo: dict[int, Any]) -> SharedT:
        return self

    def _twin(self: SharedT) -> SharedT:
        twin = super()._twin()
        vars(twin).pop("_result", None)
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_result"}


def _equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Return whether all inputs of two changes are equal: tensors by value, storages by identity."""
    return len(first) == len(second) and all(
        a is b
        if isinstance(a, Held)
        else torch.equal(a, b)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.device == b.device
        else type(a) is type(b) and not isinstance(a, Tensor) and a == b
        for a, b in zip(first, second, strict=True)
    )
