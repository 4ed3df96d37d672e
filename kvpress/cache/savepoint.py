# SPDX-License-Identifier: Apache-2.0
"""Savepoints: the state of a layer from before an event that dropping the newest pairs cannot undo."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from kvpress.cache.storage import moved, tensors_in

COUNTERS = ("since_eviction", "counted", "fixed_at", "targets", "sealed_tokens", "settled", "settle_lags", "index")


class Savepoint:
    """State of a store at `seen` tokens, right before an eviction, encoding or observation.

    No tensor is copied: sealed pairs are never written to, observers replace their tensors, and a window in use is shared with
    the store, of which the first `length` tokens belong to the savepoint. So a savepoint retains only tensors freed since then.

    `unit` is the number of tokens seen before the newest pass that can only be removed whole; None if any token can be.
    """

    def __init__(self, store: Any, unit: int | None) -> None:
        self.seen: int = store.seen
        self.unit = unit
        self.held: dict[str, Any] = {name: copy.copy(getattr(store, name)) for name in COUNTERS}
        # Copies of segments share their tensors, but not the dict of per-pair arrays.
        self.held |= {name: copy.deepcopy(getattr(store, name)) for name in ("segments", "codec_state")}
        self.held["dense"] = copy.deepcopy(store._dense)
        self.held["observers"] = {request: apart(observer) for request, observer in store.observers.items()}
        self.window = store.window
        self.length: int = store.window.length
        self.side, self.log_weight = dict(store.window.side), store.window.log_weight

    @property
    def oldest(self) -> int:
        """Tokens seen when the window was last empty, or at the last event before that dropping pairs cannot undo."""
        fixed_at: int = self.held["fixed_at"]
        return self.seen - min(self.length, self.seen - fixed_at)

    def restore(self, store: Any) -> None:
        """Restore a store; works once."""
        vars(store).update(self.held)
        store.seen, store.window = self.seen, self.window
        window = self.window
        window.length, window.side, window.cursor = self.length, self.side, None
        window.weigh(None if self.log_weight is None else self.log_weight[..., : self.length])

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the savepoint retains."""
        parts = [*self.held["segments"], *([] if self.held["dense"] is None else [self.held["dense"]])]
        of_segments = [tensor for part in parts for tensors in part.tensors().values() for tensor in tensors]
        state = [self.side, self.log_weight, self.held["codec_state"], self.held["index"], self.held["observers"]]
        return [*of_segments, *self.window.tensors(), *tensors_in(state)]

    def to(self, device: torch.device | str, memo: dict[int, Any]) -> None:
        """Move all tensors to a device."""
        for part in (*self.held["segments"], *([] if self.held["dense"] is None else [self.held["dense"]])):
            part.to(device, memo)
        for observer in self.held["observers"].values():
            observer.to(device)
        self.held["index"], self.held["codec_state"] = {}, moved(self.held["codec_state"], device, memo)
        self.side = {name: array.to(device) for name, array in self.side.items()}
        self.log_weight = None if self.log_weight is None else self.log_weight.to(device)
        self.window.to(device)


def apart(observer: Any) -> Any:
    """Return a copy that later passes do not change; tensors are shared, since observers never write to them."""
    twin = copy.copy(observer)
    vars(twin).update({name: list(entries) for name, entries in vars(observer).items() if isinstance(entries, list)})
    return twin
