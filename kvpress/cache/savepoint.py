# SPDX-License-Identifier: Apache-2.0
"""Layers as they were before something happened to them that cannot be undone by dropping the newest pairs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from kvpress.cache.storage import moved, tensors_in

COUNTERS = ("since_eviction", "counted", "fixed_at", "targets", "sealed_tokens", "settled", "index")


class Savepoint:
    """A store that had seen `seen` tokens, right before it was evicted from, encoded or observed.

    Nothing is copied: sealed pairs are never written to, observers replace their tensors, and a window that goes on is the
    window of the store itself, of which `length` tokens are meant. So what a savepoint keeps alive is what was let go of since.

    `unit` says where the newest pass began that can only be taken back as a whole, None where every token can be.
    """

    def __init__(self, store: Any, unit: int | None) -> None:
        self.seen, self.unit = store.seen, unit
        self.held: dict[str, Any] = {name: copy.copy(getattr(store, name)) for name in COUNTERS}
        # Copies of segments share their tensors, but not which per-pair arrays they have.
        self.held |= {name: copy.deepcopy(vars(store)[name]) for name in ("segments", "dense", "codec_state")}
        self.held["observers"] = {wanted: apart(observer) for wanted, observer in store.observers.items()}
        self.window, self.length = store.window, store.window.length
        self.side, self.log_weight = dict(store.window.side), store.window.log_weight

    @property
    def oldest(self) -> int:
        """How many tokens had been seen when the window was last left empty, or something else happened."""
        return self.seen - min(self.length, self.seen - self.held["fixed_at"])

    def restore(self, store: Any) -> None:
        """Put a store back, once."""
        vars(store).update(self.held)
        store.seen, store.window = self.seen, self.window
        window = self.window
        window.length, window.side, window.cursor = self.length, self.side, None
        window.weigh(None if self.log_weight is None else self.log_weight[..., : self.length])

    def tensors(self) -> list[Tensor]:
        """Tensors kept alive."""
        parts = [*self.held["segments"], *([] if self.held["dense"] is None else [self.held["dense"]])]
        found = [tensor for part in parts for tensors in part.tensors().values() for tensor in tensors]
        rest = [self.side, self.log_weight, self.held["codec_state"], self.held["index"], self.held["observers"]]
        return [*found, *self.window.tensors(), *tensors_in(rest)]

    def to(self, device: torch.device | str, memo: dict[int, Any]) -> None:
        """Move to a device, but for a window that is that of the store."""
        for part in (*self.held["segments"], *([] if self.held["dense"] is None else [self.held["dense"]])):
            part.to(device, memo)
        for observer in self.held["observers"].values():
            observer.to(device)
        self.held["index"], self.held["codec_state"] = {}, moved(self.held["codec_state"], device, memo)
        self.side = {name: array.to(device) for name, array in self.side.items()}
        self.log_weight = None if self.log_weight is None else self.log_weight.to(device)
        self.window.to(device)


def apart(observer: Any) -> Any:
    """Return an observer that further passes do not change; tensors are shared, since observers never write to them."""
    twin = copy.copy(observer)
    vars(twin).update({name: list(held) for name, held in vars(observer).items() if isinstance(held, list)})
    return twin
