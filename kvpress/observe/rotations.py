# SPDX-License-Identifier: Apache-2.0
"""Observer of the rotary embedding that a layer received for every token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted


class Rotations(Observer):
    """`cos` and `sin`, each `[1 or B, T, d]`, that a layer received for slots `first` and later.

    Exact for any position ids, and for embeddings whose frequencies change with the length. Layers of a model receive the same
    tensors, so that all layers together take the memory of one.
    """

    by_token = True

    def __init__(self) -> None:
        self.first = 0
        self.parts: list[tuple[Tensor, Tensor]] = []

    @property
    def end(self) -> int:  # type: ignore[override]
        """One past the last recorded slot."""
        return self.first + sum(cos.shape[1] for cos, _ in self.parts)

    def observe(self, call: LayerCall) -> None:
        embeddings = call.position_embeddings
        if embeddings is not None:
            if not self.parts or self.end != call.tokens.seen_before:  # tokens in between were read without the press
                self.first, self.parts = call.tokens.seen_before, []
            self.parts.append(embeddings)

    def tensors(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in part]

    def select_rows(self, rows: Tensor) -> None:
        def chosen(tensor: Tensor) -> Tensor:
            return tensor if tensor.shape[0] == 1 else tensor.index_select(0, rows.to(tensor.device))

        self.parts = [(chosen(cos), chosen(sin)) for cos, sin in self.parts]

    def to(self, device: torch.device | str) -> None:
        self.parts = [(cos.to(device), sin.to(device)) for cos, sin in self.parts]

    def crop(self, tokens: int) -> None:
        while tokens and self.parts:
            cos, sin = self.parts.pop()
            remaining = max(0, cos.shape[1] - tokens)
            tokens -= cos.shape[1] - remaining
            if remaining:
                self.parts.append((cos[:, :remaining], sin[:, :remaining]))

    def of_rows(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return `(cos, sin)`, each `[b, T, d]`, of some batch rows."""
        batch = max(cos.shape[0] for cos, _ in self.parts)
        tables = (torch.cat([part[which].expand(batch, -1, -1) for part in self.parts], dim=1) for which in (0, 1))
        cos, sin = (
            table.expand(max(rows) + 1, -1, -1)[list(rows)] if batch == 1 else table[list(rows)] for table in tables
        )
        return cos, sin


ROTATIONS = Wanted(Rotations)
"""Observer for presses that undo the rotation of keys, or rotate them to other positions."""
