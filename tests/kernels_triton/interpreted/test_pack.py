"""Quantise-and-pack in Triton against torch, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpress.kernels.packed import BITS, dequantise
from kvpress.kernels.quantise import reference
from kvpress.kernels.triton.pack import quantise

GROUPS = [(64, 1), (1, 96), (5, 4), (128, 1), (8, 8)]


@pytest.mark.parametrize(
    ("bits", "group"),
    [*((bits, (32, 1)) for bits in BITS), *((bits, (1, 32)) for bits in BITS), *((4, g) for g in GROUPS)],
)
def test_codes_and_scales_are_those_of_the_reference(bits: int, group: tuple[int, int]) -> None:
    x = torch.randn(133, 96) * torch.logspace(-3, 2, 96)
    x[7] = x[:, 5] = 0.25
    for dtype in (torch.float16, torch.float32):
        ours, expected = quantise(x.to(dtype), bits, group, dtype), reference(x.to(dtype), bits, group, dtype)
        for field, wanted in zip(("codes", "scale", "zero"), expected, strict=False):
            assert torch.equal(getattr(ours, field), wanted), field


@pytest.mark.parametrize("bits", BITS)
def test_values_come_back_within_half_a_step(bits: int) -> None:
    x = torch.randn(64, 32)
    packed = quantise(x, bits, (32, 1), torch.float32)
    error = (dequantise(packed, torch.arange(64)) - x).abs()
    assert (error <= 0.5001 * packed.scale.repeat_interleave(32, dim=0)).all()


def test_strided_rows_and_few_rows() -> None:
    wide = torch.randn(3, 160)
    ours, expected = quantise(wide[:, :128], 4, (32, 1)), reference(wide[:, :128], 4, (32, 1))
    assert torch.equal(ours.codes, expected[0])
    assert quantise(wide[:0, :128], 4, (32, 1)).codes.shape == (0, 64)


BAD = {
    "x must be": {"x": torch.zeros(3, 4, 5)},
    "x must be contiguous": {"x": torch.zeros(16, 40).T},
    "bits must be one of": {"bits": 5},
    "channels must be a multiple of 8 for 3 bits": {"x": torch.zeros(4, 12), "bits": 3, "group": (1, 4)},
    "group must be": {"group": (32, 3)},
    "parameters must be": {"parameters": torch.bfloat16},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str) -> None:
    args: dict[str, Any] = {"x": torch.zeros(40, 16), "bits": 4, "group": (32, 1)}
    with pytest.raises(ValueError, match=message):
        quantise(**(args | BAD[message]))
