# SPDX-License-Identifier: Apache-2.0
"""Quantise-and-pack in Triton against torch, bit by bit."""

from __future__ import annotations

import pytest
import torch

from kvpress.kernels import BITS
from kvpress.kernels.quantisation import reference, triton

GROUPS = [(64, 1), (1, 96), (5, 4), (128, 1), (8, 8)]


@pytest.mark.parametrize(
    ("bits", "group"),
    [*((bits, (32, 1)) for bits in BITS), *((bits, (1, 32)) for bits in BITS), *((4, g) for g in GROUPS)],
)
def test_codes_and_scales_are_those_of_the_reference(bits: int, group: tuple[int, int]) -> None:
    x = torch.randn(133, 96) * torch.logspace(-3, 2, 96)
    x[7] = x[:, 5] = 0.25
    for dtype in (torch.float16, torch.float32):
        (ours, largest), expected = (back.encode(x.to(dtype), bits, group, dtype) for back in (triton, reference))
        for field in ("codes", "scale", "zero"):
            assert torch.equal(getattr(ours, field), getattr(expected[0], field)), field
        assert largest == expected[1]


@pytest.mark.parametrize("bits", BITS)
def test_values_come_back_within_half_a_step(bits: int) -> None:
    x = torch.randn(64, 32)
    packed, _ = triton.encode(x, bits, (32, 1), torch.float32)
    error = (packed.read(torch.arange(64)) - x).abs()
    assert (error <= 0.5001 * packed.scale.repeat_interleave(32, dim=0)).all()


def test_strided_rows_and_few_rows() -> None:
    wide = torch.randn(3, 160)
    ours, expected = (back.encode(wide[:, :128], 4, (32, 1))[0] for back in (triton, reference))
    assert torch.equal(ours.codes, expected.codes)
    assert triton.encode(wide[:0, :128], 4, (32, 1))[0].codes.shape == (0, 64)
