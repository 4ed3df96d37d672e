# SPDX-License-Identifier: Apache-2.0
"""Rows of chosen blocks against a list of each stream's rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpress.kernels import Listed, Ranges, rows_of_blocks

SIZE, LENGTHS, CHOSEN = 4, [0, 3, 17, 20], [[], [0], [0, 2, 4], [1, 4]]


def problem() -> tuple[Listed, Ranges, Ranges]:
    """Return the chosen blocks, and the blocks and pairs of each stream; unused entries of the lists hold another block."""
    counts = torch.tensor([len(blocks) for blocks in CHOSEN])
    block_counts = torch.tensor([-(-length // SIZE) for length in LENGTHS])
    block_starts, lengths = block_counts.cumsum(0) - block_counts + 5, torch.tensor(LENGTHS)
    rows = torch.full((len(LENGTHS), 3), 6, dtype=torch.int32)
    for n, blocks in enumerate(CHOSEN):
        rows[n, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32) + block_starts[n].int()
    return Listed(rows, counts), Ranges(block_starts, block_counts), Ranges(lengths.cumsum(0) - lengths + 9, lengths)


def assert_rows(result: tuple[Tensor, Tensor], longest: int) -> None:
    """Compare rows and counts with those of each block."""
    rows, counts = result
    assert rows.dtype == torch.int32
    assert rows.shape == (len(LENGTHS), min(3 * SIZE, longest))
    start = 9
    for n, (length, blocks) in enumerate(zip(LENGTHS, CHOSEN, strict=True)):
        expected = [start + i for b in blocks for i in range(b * SIZE, min((b + 1) * SIZE, length))]
        assert rows[n, : counts[n]].tolist() == expected
        assert not rows[n, counts[n] :].any()
        start += length


@pytest.mark.parametrize("longest", [20, 11])
def test_rows_of_chosen_blocks_are_listed(longest: int) -> None:
    assert_rows(rows_of_blocks(*problem(), SIZE, longest=longest), longest)


def test_bad_arguments_are_named() -> None:
    chosen, blocks, pairs = problem()
    with pytest.raises(ValueError, match=r"size must be at least 1 .* got 0"):
        rows_of_blocks(chosen, blocks, pairs, 0, longest=20)
    with pytest.raises(ValueError, match="rows must be int32"):
        rows_of_blocks(Listed(chosen.rows.long(), chosen.counts), blocks, pairs, SIZE, longest=20)
    with pytest.raises(ValueError, match=r"pairs\.lengths must be int64"):
        rows_of_blocks(chosen, blocks, Ranges(pairs.starts, pairs.lengths[:2]), SIZE, longest=20)
