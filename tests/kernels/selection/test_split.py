# SPDX-License-Identifier: Apache-2.0
"""Ranks over several segments against the pairs that they number."""

from __future__ import annotations

import pytest
import torch

from kvpress.kernels import Listed, Ranges, split_rows
from kvpress.kernels.cpu import launch
from kvpress.kernels.selection import cpu, reference

LENGTHS = [[5, 0, 3], [0, 4, 1], [6, 2, 0]]
"""Pairs of three streams in three segments."""
CHOSEN = [[0, 4, 5, 7, 10], [1, 3, 4, 5], []]
"""Chosen ranks of each stream; the last entry of the second one is its last pair."""


def problem() -> tuple[Listed, list[Ranges], list[int]]:
    rows = torch.full((3, 6), 1, dtype=torch.int32)  # entries past the chosen ones do not ascend
    for n, ranks in enumerate(CHOSEN):
        rows[n, : len(ranks)] = torch.tensor(ranks, dtype=torch.int32)
    segments = []
    for lengths in LENGTHS:
        counts = torch.tensor(lengths)
        segments.append(Ranges(counts.cumsum(0) - counts + 7, counts))
    return Listed(rows, torch.tensor([len(ranks) for ranks in CHOSEN])), segments, [max(each) for each in LENGTHS]


@pytest.mark.parametrize("name", ["dispatch", "compiled", "reference"])
def test_ranks_become_rows_of_their_segments(name: str) -> None:
    chosen, segments, longest = problem()
    if name == "compiled" and launch.level() is None:
        pytest.skip("no compiled kernels")
    if name == "dispatch":
        found = split_rows(chosen, segments, longest)
    else:
        found = (cpu if name == "compiled" else reference).split(chosen.rows, chosen.counts, segments, longest)
    for s, (rows, counts) in enumerate(found):
        assert rows.dtype == torch.int32
        assert rows.shape == (3, min(6, longest[s]))
        for n, ranks in enumerate(CHOSEN):
            before = sum(LENGTHS[earlier][n] for earlier in range(s))
            start = 7 + sum(LENGTHS[s][:n])
            expected = [start + rank - before for rank in ranks if before <= rank < before + LENGTHS[s][n]]
            assert rows[n, : counts[n]].tolist() == expected
            assert not rows[n, counts[n] :].any()
    assert sum(int(counts.sum()) for _, counts in found) == sum(map(len, CHOSEN))


def test_bad_arguments_are_named() -> None:
    chosen, segments, longest = problem()
    with pytest.raises(ValueError, match="rows must be int32"):
        split_rows(Listed(chosen.rows.long(), chosen.counts), segments, longest)
    with pytest.raises(ValueError, match="lengths must be int64"):
        split_rows(chosen, [*segments[:2], Ranges(segments[2].starts, segments[2].lengths[:2])], longest)
    with pytest.raises(ValueError, match="one entry for each of 3 segments, got 2"):
        split_rows(chosen, segments, longest[:2])
    with pytest.raises(ValueError, match="stream 1 must have"):
        split_rows(
            chosen,
            [*segments[:2], Ranges(segments[2].starts.index_fill(0, torch.tensor(1), -1), segments[2].lengths)],
            longest,
        )
