# SPDX-License-Identifier: Apache-2.0
"""Merging of partial results in Triton against torch."""

from __future__ import annotations

import pytest
import torch

from kvpress.kernels.attention import reference as attention_reference
from kvpress.kernels.attention.triton.merge import merge, merge_results, reference
from tests.kernels.builders import assert_same_lse, relative_error


@pytest.mark.parametrize(("splits", "channels"), [(1, 64), (2, 80), (17, 128), (40, 33)])
def test_matches_reference_and_ignores_empty_parts(splits: int, channels: int) -> None:
    parts, part_lse = torch.randn(3, splits, 5, channels), 10 * torch.randn(3, splits, 5)
    part_lse[0] = float("-inf")
    part_lse[1, 0] = float("-inf")
    parts[part_lse.isneginf()] = 0
    out, lse = merge(parts, part_lse)
    expected, expected_lse = reference(parts, part_lse)
    assert relative_error(out, expected) < 1e-6
    assert_same_lse(lse, expected_lse, 1e-6)
    assert (out[0] == 0).all()


def test_outputs_of_empty_parts_are_not_read() -> None:
    parts, part_lse = torch.randn(2, 3, 4, 64), torch.randn(2, 3, 4)
    part_lse[:, 1], parts[:, 1] = float("-inf"), float("nan")
    out, _ = merge(parts, part_lse)
    expected, _ = merge(parts[:, ::2], part_lse[:, ::2])
    assert relative_error(out, expected) < 1e-6


@pytest.mark.parametrize("count", [2, 3, 5])
def test_results_of_several_parts_are_merged_where_they_are(count: int) -> None:
    results = [(torch.randn(3, 4, 80), 10 * torch.randn(3, 4)) for _ in range(count)]
    results[1] = (torch.zeros(3, 4, 80), torch.full((3, 4), float("-inf")))
    results[0] = (results[0][0].transpose(0, 1).contiguous().transpose(0, 1), results[0][1])  # strided
    for out, lse in results:
        out[2], lse[2] = 0, float("-inf")
    out, lse = merge_results(results)
    expected, expected_lse = attention_reference.merge(results)
    assert relative_error(out, expected) < 1e-6
    assert_same_lse(lse, expected_lse, 1e-6)


def test_results_that_are_nan_stay_nan() -> None:
    results = [(torch.randn(1, 2, 64), torch.zeros(1, 2)) for _ in range(2)]
    results[1][0][0, 0], results[1][1][0, 0] = float("nan"), float("nan")
    out, lse = merge_results(results)
    assert out[0, 0].isnan().all()
    assert lse[0, 0].isnan()
    assert out[0, 1].isfinite().all()


def test_bad_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="parts must be"):
        merge(torch.zeros(2, 3, 4), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="part_lse must be"):
        merge(torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 5))
