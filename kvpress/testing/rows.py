# SPDX-License-Identifier: Apache-2.0
"""A row of a padded batch against that row alone: pairs that stay, encoded pairs and logits over two turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from kvpress.hf.models import with_cache
from kvpress.testing.comparison import Fault, Positions, explain, positions, same, unequal_positions
from kvpress.testing.models import grow, noise, padded_batch, position_ids, tokens

GENERATED = 15, 9
"""Tokens after the prompt and after the later turn."""


class TwoTurns:
    """Two turns of one row or more under a press: a prompt, 15 tokens, a later turn, 9 tokens."""

    def __init__(
        self,
        model: Any,
        press: Any,
        ids: Tensor,
        mask: Tensor | None,
        rows: list[int],
        later: Sequence[int],
        generated: tuple[int, int] = GENERATED,
    ) -> None:
        """Read both turns.

        `rows` are the numbers of the rows in the whole batch, which seed their tokens, `later` their tokens in the later turn,
        padded on the left to the longest, and `generated` the tokens after each turn.
        """
        self.model, self.rows, self.mask = model, rows, mask
        self.cache = DynamicCache(config=model.config)
        self.logits: list[Tensor] = []
        with press(model):
            self.read(ids)
            self.generate(generated[0], 0)
            turns = [tokens(1, count, seed=500 + row) for row, count in zip(rows, later, strict=True)]
            self.read_padded(turns)
            self.generate(generated[1], 100)

    def generate(self, count: int, seed: int) -> None:
        """Read `count` fixed tokens one by one."""
        for t in range(count):
            self.mask = grow(self.mask, 1)
            self.read(torch.cat([tokens(1, 1, seed=1000 * row + seed + t) for row in self.rows]))

    def read_padded(self, turns: Sequence[Tensor]) -> None:
        """Read a turn of each row, ids `[1, n]`, padded on the left to the longest."""
        longest = max(turn.shape[1] for turn in turns)
        real = torch.cat([pad(torch.ones_like(turn), (longest - turn.shape[1], 0)) for turn in turns])
        if self.mask is None and not real.all():
            self.mask = torch.ones(len(turns), self.cache.get_seq_length(), dtype=torch.long)
        self.mask = None if self.mask is None else torch.cat([self.mask, real], dim=1)
        self.read(torch.cat([pad(turn, (longest - turn.shape[1], 0)) for turn in turns]))

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

    def positions(self, row: int) -> Positions:
        """Return the positions of the kept pairs of a row, without padding."""
        if self.mask is None:
            return [[layer[row]] for layer in positions(self.cache)]
        real = self.mask[row].bool()
        ranks = (real.cumsum(dim=0) - 1).tolist()
        return [[[[ranks[at] for at in head if real[at]] for head in layer[row]]] for layer in positions(self.cache)]


def check_rows_alone(
    model: Any,
    press: Any,
    lengths: tuple[int, ...],
    name: str = "padded row",
    exact: bool = True,
    later: Sequence[int] = (),
    generated: tuple[int, int] = GENERATED,
) -> None:
    """Check that each row stores, encodes and predicts as alone; noise must explain logits that differ by over 1e-4.

    Args:
        model: a float32 model.
        press: the press under test.
        lengths: tokens of each row, which are padded on the left to the longest.
        name: name of the property, for the error.
        exact: exactly the same pairs stay; otherwise, noise may explain a difference, for scores that tie.
        later: tokens of each row in the later turn, padded likewise; 5 by default.
        generated: tokens that are read one by one after each turn.

    Raises:
        Fault: a row differs.
    """
    ids, mask = padded_batch(list(lengths))
    later = later or (5,) * len(lengths)
    together = TwoTurns(model, press, ids, mask, list(range(len(lengths))), later, generated)
    for row, (length, count) in enumerate(zip(lengths, later, strict=True)):
        read_alone = partial(TwoTurns, model, press, ids[row : row + 1, -length:], None, [row], (count,), generated)
        _check_row(together, read_alone, row, f"{name}, row {row} of {length} tokens", exact)


def _check_row(together: TwoTurns, read_alone: Callable[[], TwoTurns], row: int, where: str, exact: bool) -> None:
    alone = read_alone()
    expected = torch.cat(alone.logits[1:])

    @cache
    def noisy(seed: int) -> TwoTurns:
        with noise(seed, together.model):
            return read_alone()

    def noisy_pairs(seed: int) -> int:
        return len(unequal_pairs(noisy(seed), 0, alone, 0))

    if unequal := unequal_pairs(together, row, alone, 0):
        is_rounding, explained = (False, 0.0) if exact else explain(len(unequal), noisy_pairs)
        if not is_rounding:
            raise Fault(
                where,
                f"{len(unequal)} pairs differ from those of the row alone, rounding explains {explained:.0f}: {unequal[0]}",
            )
    batched = torch.stack([logits[row] for logits in together.logits[1:]])
    same(batched, expected, lambda seed: torch.cat(noisy(seed).logits[1:]), where, free=1e-4)


def unequal_pairs(first: TwoTurns, first_row: int, second: TwoTurns, second_row: int) -> list[str]:
    """Return one line for each pair that only one of two rows stores or encodes."""
    lines = unequal_positions(first.positions(first_row), second.positions(second_row))
    encoded, expected_counts = first.encoded(first_row), second.encoded(second_row)
    for layer, counts in enumerate(zip(encoded, expected_counts, strict=True)):
        for head, (count, expected_count) in enumerate(zip(*counts, strict=True)):
            line = f"{count} encoded pairs instead of {expected_count}, compressed layer {layer}, head {head}"
            lines += [line] * abs(count - expected_count)
    return lines
