# SPDX-License-Identifier: Apache-2.0
"""A row of a padded batch against that row alone: pairs that stay, encoded pairs and logits over two turns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.hf.models import with_cache
from kvpress.testing.comparison import Fault, same
from kvpress.testing.models import grow, noise, padded_batch, position_ids, tokens


class TwoTurns:
    """Two turns of one row or more under a press: a prompt, 15 tokens, 5 tokens of a later turn, 9 tokens."""

    def __init__(self, model: Any, press: Any, ids: Tensor, mask: Tensor | None, rows: list[int]) -> None:
        """Read both turns; `rows` are the numbers of the rows in the whole batch, which seed their tokens."""
        self.model, self.rows, self.mask = model, rows, mask
        self.cache = DynamicCache(config=model.config)
        self.logits: list[Tensor] = []
        with press(model):
            self.read(ids)
            self.generate(15, 0)
            self.mask = grow(self.mask, 5)
            self.read(torch.cat([tokens(1, 5, seed=500 + row) for row in rows]))
            self.generate(9, 100)

    def generate(self, count: int, seed: int) -> None:
        """Read `count` fixed tokens one by one."""
        for t in range(count):
            self.mask = grow(self.mask, 1)
            self.read(torch.cat([tokens(1, 1, seed=1000 * row + seed + t) for row in self.rows]))

    def read(self, ids: Tensor) -> None:
        """Read `ids [B, n]` in one pass and store the logits of the last token."""
        at = position_ids(self.mask, ids.shape[1])
        logits = self.model(ids, attention_mask=self.mask, **with_cache(self.cache), position_ids=at).logits
        self.logits.append(logits[:, -1])

    def encoded(self, row: int) -> list[list[int]]:
        """Return the number of encoded pairs of every head of a row, layer by layer."""
        lengths = []
        for store in (layer.store for layer in self.cache.layers if hasattr(layer, "store")):
            heads = range(row * store.heads, (row + 1) * store.heads)
            lengths.append([sum(segment.layout.lengths[n] for segment in store.segments) for n in heads])
        return lengths

    def positions(self, row: int) -> list[list[list[int]]]:
        """Return the positions of the kept pairs of every head of a row, layer by layer, without padding."""
        pads = 0 if self.mask is None else int((~self.mask[row].bool()).sum())
        kept = kvpress.kept_positions(self.cache)
        return [[[at - pads for at in head.tolist() if at >= pads] for head in layer[row]] for layer in kept]


def check_rows_alone(model: Any, press: Any, lengths: tuple[int, ...], name: str = "padded row") -> None:
    """Check that each row stores, encodes and predicts as alone; noise must explain logits that differ by over 1e-4.

    Args:
        model: a float32 model.
        press: the press under test.
        lengths: tokens of each row, which are padded on the left to the longest.
        name: name of the property, for the error.

    Raises:
        Fault: a row differs.
    """
    ids, mask = padded_batch(list(lengths))
    together = TwoTurns(model, press, ids, mask, list(range(len(lengths))))
    for row, length in enumerate(lengths):

        def run(row: int = row, length: int = length) -> TwoTurns:
            return TwoTurns(model, press, ids[row : row + 1, -length:], None, [row])

        def noisy(seed: int, run: Any = run) -> Tensor:
            with noise(seed, model):
                return torch.cat(run().logits[1:])

        alone = run()
        where = f"row {row} of {length} tokens"
        _equal_lists(together.encoded(row), alone.encoded(0), name, f"{where}: numbers of encoded pairs")
        _equal_lists(together.positions(row), alone.positions(0), name, f"{where}: positions of kept pairs")
        batched = torch.stack([logits[row] for logits in together.logits[1:]])
        same(batched, torch.cat(alone.logits[1:]), noisy, f"{name} ({where})", free=1e-4)


def _equal_lists(batched: list[Any], alone: list[Any], name: str, words: str) -> None:
    for layer, (in_batch, by_itself) in enumerate(zip(batched, alone, strict=True)):
        for head, (ours, theirs) in enumerate(zip(in_batch, by_itself, strict=True)):
            if ours != theirs:
                raise Fault(name, f"{words} in layer {layer}, head {head} are {ours} in a batch and {theirs} alone")
