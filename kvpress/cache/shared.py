# SPDX-License-Identifier: Apache-2.0
"""Storage that segments of several layers refer to, so that its tensors are stored once."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kvpress.cache.storage import Held, Joint, RowChoice

SharedT = TypeVar("SharedT", bound="SharedHeld")

_alive: WeakValueDictionary[bytes, SharedHeld] = WeakValueDictionary()
"""Storages that were made of others by a change, by the digest of these and of the change."""


class SharedHeld(Held):
    """Storage that is a part of a segment in each of several layers.

    Layers take rows, join and move their segments one after another. A layer that makes the same change as another one before
    gets the storage that the other one got, as long as that is in use; layers that make different changes get copies. Copies
    of a cache share the storage itself.
    """

    @property
    def key(self) -> bytes:
        """Digest of the changes that made the storage; random for a new one."""
        key: bytes = vars(self).setdefault("_key", uuid.uuid4().bytes)
        return key

    def _once(self: SharedT, change: str, inputs: Sequence[Any], make: Callable[[], SharedT]) -> SharedT:
        """Return `make()`, or the result of the same change with equal inputs, if it is in use."""
        digest = blake2b(self.key + change.encode(), digest_size=16)
        for value in inputs:
            digest.update(_bytes_of(value))
        result = _alive.get(digest.digest())
        if result is None:
            result = make()
            vars(result)["_key"] = digest.digest()
            _alive[result.key] = result
        return cast(SharedT, result)

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
        return self  # segments have the slots

    def __deepcopy__(self: SharedT, memo: dict[int, Any]) -> SharedT:
        return self

    def _twin(self: SharedT) -> SharedT:
        twin = super()._twin()
        vars(twin).pop("_key", None)
        return twin


def _bytes_of(value: Any) -> bytes:
    """Return bytes that are equal for equal inputs of a change."""
    if isinstance(value, SharedHeld):
        return value.key
    if isinstance(value, Tensor):
        return repr((value.dtype, tuple(value.shape))).encode() + value.cpu().contiguous().numpy().tobytes()
    return repr(value).encode()
