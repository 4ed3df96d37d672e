# SPDX-License-Identifier: Apache-2.0
"""Choice of the rows with the largest scores in Triton against sorting one stream at a time."""

from __future__ import annotations

import pytest
import torch

from kvpress.kernels import Ranges
from kvpress.kernels.selection import parallel, reference, triton
from kvpress.kernels.triton import grid
from tests.kernels.selection.test_blocks import SIZE, assert_rows, problem
from tests.kernels.selection.test_top_rows import KINDS, assert_chosen, drawn, placed

LENGTHS = [0, 1, 39, 40, 41, 5000]
CAPACITY = 5001


@pytest.fixture(params=["one program", "several"], autouse=True)
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one program read a stream, or several with chunks that are shorter than it."""
    if request.param == "several":
        monkeypatch.setattr(triton, "LONGEST", 0)
        monkeypatch.setattr(parallel, "CHUNK", 1024)
        monkeypatch.setattr(parallel, "BLOCK", 256)


@pytest.mark.parametrize("kind", KINDS)
def test_chooses_the_largest(kind: str) -> None:
    starts, lengths = placed(LENGTHS)
    scores = drawn(kind, LENGTHS, CAPACITY)
    for k, first, last in [(1, 0, 0), (40, 4, 9), (40, 20, 20), (6000, 4, 0)]:
        ours = triton.choose(scores, Ranges(starts, lengths), k, first, last)
        assert_chosen(ours, scores, starts, lengths, k, first, last)


def test_streams_may_choose_different_numbers_from_strided_scores() -> None:
    starts, lengths = placed(LENGTHS)
    scores = torch.cat([drawn("ties", LENGTHS, CAPACITY), torch.full((len(LENGTHS), 50), float("inf"))], dim=1)
    args = (scores[:, :CAPACITY], Ranges(starts, lengths), 40, 4, 9, torch.tensor([40, 13, 39, 13, 40, 17]))
    for ours, expected in zip(triton.choose(*args), reference.choose(*args), strict=True):
        assert torch.equal(ours, expected)


def test_nothing_to_choose_from() -> None:
    nothing = torch.zeros(2, dtype=torch.int64)
    rows, counts = triton.choose(torch.zeros(2, 0), Ranges(nothing, nothing), 5, 2, 3)
    assert rows.shape == (2, 0)
    assert counts.tolist() == [0, 0]


@pytest.mark.parametrize("longest", [20, 11])
def test_rows_of_chosen_blocks_are_listed(longest: int) -> None:
    chosen, blocks, pairs = problem()
    assert_rows(triton.of_blocks(chosen.rows, chosen.counts, blocks, pairs, SIZE, longest), longest)


def test_more_streams_than_a_grid_has_are_listed_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "MOST_STREAMS", 2)
    chosen, blocks, pairs = problem()
    assert len(chosen.rows) > 2
    assert_rows(triton.of_blocks(chosen.rows, chosen.counts, blocks, pairs, SIZE, 20), 20)
