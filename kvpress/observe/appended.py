# SPDX-License-Identifier: Apache-2.0
"""Pairs that were read behind a prompt, for an eviction to put beside those that stay."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted


class ReadBehind(Observer):
    """Keys `[B, H, n, D]` and values of one layer that wait for its next eviction; None where none do."""

    def __init__(self) -> None:
        self.pairs: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """How many pairs wait, per head."""
        return 0 if self.pairs is None else self.pairs[0].shape[2]

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Return the pairs, and wait no longer."""
        pairs, self.pairs = self.pairs, None
        return pairs

    def observe(self, call: LayerCall) -> None:
        """Whoever reads behind the prompt fills it in."""

    def tensors(self) -> list[Tensor]:
        return list(self.pairs or ())

    def select_rows(self, rows: Tensor) -> None:
        """Pairs are taken before anything else happens to the cache."""
        self.pairs = None

    def to(self, device: torch.device | str) -> None:
        self.pairs = None if self.pairs is None else (self.pairs[0].to(device), self.pairs[1].to(device))


BEHIND = Wanted(ReadBehind)
"""The observer of a layer that holds what was read behind its prompt."""


def waiting(call: LayerCall) -> int:
    """How many pairs per head wait for the next eviction of a layer."""
    held: ReadBehind | None = call.store.observers.get(BEHIND)
    return 0 if held is None else held.length
