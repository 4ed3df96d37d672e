# SPDX-License-Identifier: Apache-2.0
"""Uniform quantisation: error bound, degenerate groups, rows that survive an eviction."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpress.kernels import BITS, unpack
from kvpress.quant.uniform import UniformRows

GROUPS = [(32, 1), (1, 32), (16, 1), (1, 64), (8, 8)]


def values(rows: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = torch.exp(torch.randn(dim, generator=generator))
    return (torch.randn(rows, dim, generator=generator) * scales + scales.roll(1)).to(dtype)


def spread(parameter: Tensor, group: tuple[int, int]) -> Tensor:
    return parameter.float().repeat_interleave(group[0], 0).repeat_interleave(group[1], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_error_is_at_most_half_a_step(bits: int, group: tuple[int, int], dtype: torch.dtype) -> None:
    x = values(64, 64, dtype)
    packed = UniformRows.encode(x, bits, group)
    scale, zero = spread(packed.scale, group), spread(packed.zero, group)
    codes = unpack(packed.codes, bits).float()
    # Rounding of the stored zero may push an extreme value out of range by that much, and of scale by its top code.
    slack = (
        zero.abs() * 2**-10 + scale * 2 ** (bits - 10) if dtype != torch.float32 else scale * 1e-4 + zero.abs() * 1e-6
    )
    assert ((codes * scale + zero - x.float()).abs() <= scale / 2 + slack).all()
    torch.testing.assert_close(packed.read(slice(None)), (codes * scale + zero).to(dtype))


def test_more_bits_are_better_and_smaller_groups_are_better() -> None:
    x = values(256, 64)

    def error(bits: int, rows: int) -> float:
        return float((UniformRows.encode(x, bits, (rows, 1)).read(slice(None)) - x).square().mean())

    assert error(8, 32) < error(4, 32) < error(3, 32) < error(2, 32) < error(1, 32)
    assert error(2, 32) < error(2, 64) < error(2, 128)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.25, 1e-8, 60000.0])
def test_constant_groups_are_exact(bits: int, value: float) -> None:
    x = torch.full((32, 64), value)
    assert torch.equal(UniformRows.encode(x, bits, (32, 1)).read(slice(None)), x)


def test_extremes_in_one_group_stay_finite() -> None:
    x = values(32, 64, torch.float16)
    x[0], x[1] = 65504.0, -65504.0
    x[2] = 1e-8
    decoded = UniformRows.encode(x, 4, (32, 1)).read(slice(None))
    assert torch.isfinite(decoded.float()).all()
    assert (decoded.float() - x.float()).abs().max() <= 2 * 65504 / 15 / 2 * 1.01


def test_infinite_values_are_refused() -> None:
    x = values(32, 64)
    x[3, 4] = torch.inf
    with pytest.raises(ValueError, match="infinite"):
        UniformRows.encode(x, 4, (32, 1))


def test_an_outlier_channel_leaves_the_others_alone() -> None:
    x = values(32, 64)
    loud = x.clone()
    loud[:, 7] *= 100
    quiet = [c for c in range(64) if c != 7]
    plain, changed = (unpack(UniformRows.encode(v, 2, (32, 1)).codes, 2)[:, quiet] for v in (x, loud))
    assert torch.equal(plain, changed)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(BITS), st.sampled_from(GROUPS[:2]), st.integers(0, 2**20), st.integers(0, 2**20))
def test_rows_keep_their_scale_when_others_are_removed(
    bits: int, group: tuple[int, int], seed: int, choice: int
) -> None:
    generator = torch.Generator().manual_seed(choice)
    packed = UniformRows.encode(values(96, 32, seed=seed), bits, group)
    decoded = packed.read(slice(None))
    rows = torch.rand(96, generator=generator).lt(0.5).nonzero().flatten()
    subset = packed.take(rows)
    assert torch.equal(subset.read(slice(None)), decoded[rows])
    reversed_subset = subset.take(torch.arange(len(rows)).flip(0))
    assert torch.equal(reversed_subset.read(slice(None)), decoded[rows].flip(0))
    joined = UniformRows.concatenate([subset, packed])
    assert torch.equal(joined.read(slice(None)), torch.cat([decoded[rows], decoded]))
    assert subset.scale.shape[0] <= packed.scale.shape[0]


def test_taking_everything_keeps_the_regular_form() -> None:
    packed = UniformRows.encode(values(96, 32), 4, (32, 1))
    assert packed.take(torch.arange(96)).runs.lengths is None
