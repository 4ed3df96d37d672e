# SPDX-License-Identifier: Apache-2.0
"""Page bounds and label scores in Triton against float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpress.kernels import Dense, Ranges
from kvpress.kernels.scores import reference
from kvpress.kernels.scores.triton import score
from kvpress.kernels.triton import grid
from tests.kernels.builders import quantise, quantise_centred, relative_error, streams
from tests.kernels_triton.interpreted.problems import LENGTHS, poison


def assert_close(ours: Tensor, expected: Tensor) -> None:
    assert torch.equal(ours.isneginf(), expected.isneginf())
    assert relative_error(ours.nan_to_num(neginf=0.0), expected.nan_to_num(neginf=0.0)) < 1e-5


@pytest.mark.parametrize(
    ("dim", "queries", "dtype"),
    [
        (64, 1, torch.float16),
        (80, 4, torch.float32),
        (96, 16, torch.float16),
        (128, 70, torch.float32),
        (192, 3, torch.float16),
        (256, 2, torch.float32),
    ],
)
def test_bounds_match_reference(dim: int, queries: int, dtype: torch.dtype) -> None:
    s = streams(LENGTHS, queries, dim, dtype)
    a, b = torch.randn(2, s.rows, dim).to(dtype)
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    poison(s, low, high)
    args = (s.q, Dense(low), Dense(high), s.where, "max", 150)
    assert_close(score(*args), reference.score(*args))


def test_more_streams_than_a_grid_has_are_scored_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "MOST_STREAMS", 2)
    s = streams(LENGTHS, 4, 64, torch.float16)
    assert len(LENGTHS) > 2
    low, high = torch.randn(2, s.rows, 64).half().sort(dim=0).values
    args = (s.q, Dense(low), Dense(high), s.where, "max", 150)
    assert_close(score(*args), reference.score(*args))


@pytest.mark.parametrize("reduce", ["max", "sum"])
@pytest.mark.parametrize(
    ("width", "queries", "dtype"), [(4, 4, torch.float32), (16, 1, torch.float16), (32, 70, torch.float16)]
)
def test_labels_match_reference(width: int, queries: int, dtype: torch.dtype, reduce: str) -> None:
    s = streams([*LENGTHS, 300], queries, width, dtype)
    wide = torch.randn(s.rows, 2 * width).to(dtype)
    labels = wide[:, width:]
    poison(s, labels)
    args = (s.q, None, Dense(labels), s.where, reduce, 300)
    assert_close(score(*args), reference.score(*args))


@pytest.mark.parametrize("reduce", ["max", "sum"])
@pytest.mark.parametrize(("bits", "width", "queries"), [(1, 128, 1), (2, 16, 4), (4, 32, 70), (8, 20, 16)])
def test_quantised_labels_match_reference(bits: int, width: int, queries: int, reduce: str) -> None:
    s = streams([*LENGTHS, 300], queries, width, torch.float16)
    labels, _ = quantise(torch.randn(s.rows, width), bits, (1, width))
    poison(s, labels.scale, labels.zero)
    args = (s.q, None, labels, s.where, reduce, 300)
    assert_close(score(*args), reference.score(*args))


@pytest.mark.parametrize(("bits", "width"), [(2, 16), (8, 20)])
def test_labels_with_a_zero_point_match_reference(bits: int, width: int) -> None:
    s = streams([*LENGTHS, 300], 4, width, torch.float16)
    labels, _ = quantise_centred(torch.randn(s.rows, width), bits)
    args = (s.q, None, labels, s.where, "max", 300)
    assert_close(score(*args), reference.score(*args))


def test_rows_past_the_capacity_are_not_scored() -> None:
    s = streams([5, 60], 4, 16)
    labels = Dense(torch.randn(s.rows, 16))
    scores = score(s.q, None, labels, s.where, "max", 60)
    assert torch.equal(score(s.q, None, labels, s.where, "max", 20), scores[:, :20])


def test_nothing_to_do() -> None:
    nothing = torch.zeros(2, dtype=torch.int64)
    rows = Dense(torch.zeros(0, 8))
    assert score(torch.zeros(2, 1, 8), rows, rows, Ranges(nothing, nothing), "max", 0).shape == (2, 0)
