# SPDX-License-Identifier: Apache-2.0
"""Pairs of tokens that were read after a prompt, for the next eviction to add to the kept ones."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted


class ReadBehind(Observer):
    """Keys `[B, H, n, D]` and values of one layer, to be added at its next eviction; None without any."""

    def __init__(self) -> None:
        self.pairs: tuple[Tensor, Tensor] | None = None

    @property
    def length(self) -> int:
        """Number of pairs per head."""
        return 0 if self.pairs is None else self.pairs[0].shape[2]

    def take(self) -> tuple[Tensor, Tensor] | None:
        """Return the pairs and remove them."""
        pairs, self.pairs = self.pairs, None
        return pairs

    def observe(self, call: LayerCall) -> None:
        """Do nothing: the press that reads the tokens sets `pairs`."""

    def tensors(self) -> list[Tensor]:
        return list(self.pairs or ())

    def select_rows(self, rows: Tensor) -> None:
        """Drop the pairs; they are taken before rows are selected."""
        self.pairs = None

    def to(self, device: torch.device | str) -> None:
        self.pairs = None if self.pairs is None else (self.pairs[0].to(device), self.pairs[1].to(device))


BEHIND = Wanted(ReadBehind)
"""Observer of pairs that were read after the prompt."""


def waiting(call: LayerCall) -> int:
    """Return the number of pairs per head to be added at the next eviction of a layer."""
    observer: ReadBehind | None = call.store.observers.get(BEHIND)
    return 0 if observer is None else observer.length
