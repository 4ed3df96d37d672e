"""Packing is exact, pure and as dense as it says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpress.quant.packing import BITS, pack, packed_width, unpack


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(BITS), st.integers(0, 9), st.integers(1, 12), st.integers(0, 2**31 - 1))
def test_round_trip(bits: int, rows: int, eighths: int, seed: int) -> None:
    codes = torch.randint(
        0, 2**bits, (rows, 8 * eighths), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    before = codes.clone()
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (rows, packed_width(8 * eighths, bits)) == (rows, eighths * bits)
    assert torch.equal(unpack(packed, bits), codes)
    assert torch.equal(codes, before)


def test_strides_do_not_matter() -> None:
    codes = torch.randint(0, 16, (32, 24), dtype=torch.uint8)
    assert torch.equal(pack(codes.T, 4), pack(codes.T.contiguous(), 4))


def test_the_layout_is_split_halves() -> None:
    codes = torch.tensor([[1, 2, 3, 4]], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [[1 + 16 * 3, 2 + 16 * 4]]


@pytest.mark.parametrize(
    ("dim", "bits", "message"), [(64, 5, r"\[1, 2, 3, 4, 8\], got 5"), (6, 2, "multiple of 4"), (7, 4, "got 7")]
)
def test_refuses(dim: int, bits: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_width(dim, bits)
