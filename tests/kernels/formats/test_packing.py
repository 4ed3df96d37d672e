# SPDX-License-Identifier: Apache-2.0
"""Packing is exact and pure, and uses the stated number of bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpress.kernels import CODE_BITS, check_packing, pack, unpack


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(CODE_BITS), st.integers(0, 9), st.integers(1, 12), st.integers(0, 2**31 - 1))
def test_round_trip(bits: int, rows: int, eighths: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (rows, 8 * eighths), generator=torch.Generator().manual_seed(seed))
    before = codes.clone()
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (rows, eighths * bits)
    assert torch.equal(unpack(packed, bits).long(), codes)
    assert torch.equal(codes, before)


@pytest.mark.parametrize("bits", CODE_BITS)
def test_the_largest_code_sets_every_bit(bits: int) -> None:
    dtype = torch.int16 if bits > 8 else torch.uint8
    largest = torch.full((2, 8), 2**bits - 1, dtype=dtype)
    assert torch.equal(pack(largest, bits), torch.full((2, bits), 255, dtype=torch.uint8))
    assert torch.equal(unpack(pack(largest, bits), bits), largest)


def test_strides_do_not_matter() -> None:
    codes = torch.randint(0, 16, (32, 24), dtype=torch.uint8)
    assert torch.equal(pack(codes.T, 4), pack(codes.T.contiguous(), 4))


def test_the_layout_is_split_halves() -> None:
    codes = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [[1 + 16 * 3, 2 + 16 * 4]]


def test_wide_codes_are_a_byte_each_and_then_their_high_bits() -> None:
    codes = torch.tensor([[0x1AB, 0x2CD, 0x3EF, 0x001]])
    assert pack(codes, 10).tolist() == [[0xAB, 0xCD, 0xEF, 0x01, 1 + 2 * 4 + 3 * 16 + 0 * 64]]


@pytest.mark.parametrize(
    ("dim", "bits", "message"),
    [
        (64, 5, r"\[1, 2, 3, 4, 8, 9, 10, 12\], got 5"),
        (6, 2, "multiple of 4"),
        (7, 4, "got 7"),
        (12, 9, "9-bit codes need rows of a multiple of 8"),
        (6, 10, "multiple of 4"),
        (3, 12, "multiple of 2"),
    ],
)
def test_refuses(dim: int, bits: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_packing(dim, bits)
