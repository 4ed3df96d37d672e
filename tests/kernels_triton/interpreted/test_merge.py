# SPDX-License-Identifier: Apache-2.0
"""Merging of partial results in Triton against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpress.kernels.attention import reference
from kvpress.kernels.attention.triton import as_partials, merge_partials
from kvpress.kernels.attention.triton.merge import Partials
from kvpress.kernels.triton.grid import LEAST_BLOCKS, MOST_SPLITS
from tests.kernels.builders import assert_same_lse, relative_error

BLOCK = 4


def split_counts(lengths: list[int], splits: int) -> list[int]:
    """Return the splits of each stream, one stream at a time."""
    blocks = [-(-length // BLOCK) for length in lengths]
    size = max(LEAST_BLOCKS, -(-max(blocks) // MOST_SPLITS), -(-sum(blocks) // (splits - len(lengths))))
    return [-(-count // size) for count in blocks]


def drawn(lengths: list[int], splits: int, queries: int, channels: int) -> tuple[Partials, list[tuple[Tensor, Tensor]]]:
    """Return results of ragged splits, NaN past the last, and the results of each stream as reference parts."""
    counts = split_counts(lengths, splits)
    assert sum(counts) <= splits
    out, lse = torch.randn(splits, queries, channels), 10 * torch.randn(splits, queries)
    out[sum(counts) :], lse[sum(counts) :] = float("nan"), float("nan")
    streams, first = [], 0
    for count in counts:
        streams.append((out[first : first + count], lse[first : first + count]))
        first += count
    return Partials(out, lse, torch.tensor(lengths), splits, BLOCK), streams


def expected_of(streams: list[list[tuple[Tensor, Tensor]]], queries: int, channels: int) -> tuple[Tensor, Tensor]:
    """Merge the parts [M, Dv] of each stream in plain torch, in float64: in float32 its error is larger than ours."""
    outs, lses = [], []
    for parts in streams:
        nothing = torch.zeros(1, queries, channels).double(), torch.full((1, queries), float("-inf")).double()
        out, lse = reference.merge([nothing, *((o[None].double(), s[None].double()) for o, s in parts)])
        outs.append(out[0])
        lses.append(lse[0])
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("lengths", [[0, 7, 1000, 3], [64, 64, 64], [5000], [9] * 33])
@pytest.mark.parametrize("splits", [66, 90, 700])
def test_ragged_splits_and_results_are_merged_in_one_launch(lengths: list[int], splits: int) -> None:
    channels = 80
    ragged, streams = drawn(lengths, splits, 5, channels)
    ragged.lse[:2, 1] = float("-inf")  # programs whose query sees no row; their outputs are not read
    ragged.out[:2, 1] = 0
    whole = torch.randn(len(lengths), 5, channels), 10 * torch.randn(len(lengths), 5)
    out, lse = merge_partials(whole[0], [*as_partials([whole]), ragged])
    parts = [[(whole[0][n], whole[1][n]), *zip(outs, lses, strict=True)] for n, (outs, lses) in enumerate(streams)]
    expected, expected_lse = expected_of(parts, 5, channels)
    assert relative_error(out, expected) < 1e-6
    assert_same_lse(lse, expected_lse, 1e-6)


def test_streams_without_rows_have_no_output() -> None:
    ragged, streams = drawn([0, 100, 0], 16, 2, 64)
    out, lse = merge_partials(torch.empty(3, 2, 64), [ragged])
    expected, expected_lse = expected_of([list(zip(*parts, strict=True)) for parts in streams], 2, 64)
    assert relative_error(out, expected) < 1e-6
    assert_same_lse(lse, expected_lse, 1e-6)
    assert (out[0] == 0).all()
    assert lse[0].isneginf().all()


def test_outputs_of_empty_parts_are_not_read() -> None:
    results = [(torch.randn(2, 4, 64), torch.randn(2, 4)) for _ in range(3)]
    results[1] = (torch.full((2, 4, 64), float("nan")), torch.full((2, 4), float("-inf")))
    out, _ = merge_partials(results[0][0], as_partials(results))
    expected, _ = reference.merge(results[::2])
    assert relative_error(out, expected) < 1e-6


@pytest.mark.parametrize("count", [2, 3, 5])
def test_results_of_several_parts_are_merged_where_they_are(count: int) -> None:
    results = [(torch.randn(3, 4, 80), 10 * torch.randn(3, 4)) for _ in range(count)]
    results[1] = (torch.zeros(3, 4, 80), torch.full((3, 4), float("-inf")))
    results[0] = (results[0][0].transpose(0, 1).contiguous().transpose(0, 1), results[0][1])  # strided
    for out, lse in results:
        out[2], lse[2] = 0, float("-inf")
    out, lse = merge_partials(results[0][0], as_partials(results))
    expected, expected_lse = reference.merge(results)
    assert relative_error(out, expected) < 1e-6
    assert_same_lse(lse, expected_lse, 1e-6)


def test_results_that_are_nan_stay_nan() -> None:
    results = [(torch.randn(1, 2, 64), torch.zeros(1, 2)) for _ in range(2)]
    results[1][0][0, 0], results[1][1][0, 0] = float("nan"), float("nan")
    out, lse = merge_partials(results[0][0], as_partials(results))
    assert out[0, 0].isnan().all()
    assert lse[0, 0].isnan()
    assert out[0, 1].isfinite().all()
