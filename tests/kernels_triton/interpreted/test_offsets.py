# SPDX-License-Identifier: Apache-2.0
"""Rows beyond 2**31 elements: an offset in 32 bits would wrap, and read or write elsewhere.

Storage takes address space only: pages that are not touched take no memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvpress.kernels import Dense, Listed, Options, Packed, Ranges, Rows
from kvpress.kernels.attention import reference
from kvpress.kernels.attention.triton import decode
from kvpress.kernels.mass import reference as mass_reference
from kvpress.kernels.mass import triton as mass
from kvpress.kernels.quantisation import triton as quantisation
from kvpress.kernels.scores import reference as scores_reference
from kvpress.kernels.scores import triton as scores

LENGTH, STRIDE, D = 40, 2**20, 32
FIRST = 2**31 // STRIDE
"""First row with elements past 2**31."""

ROUNDING = 4e-3
"""Tolerance of float16 products."""

WHERE = Ranges(torch.tensor([5, FIRST + 3]), torch.tensor([LENGTH, LENGTH]))
LISTED = Listed(torch.stack([start + torch.arange(LENGTH) for start in WHERE.starts]).int(), WHERE.lengths)


def wide() -> Tensor:
    """Return rows that lie `STRIDE` elements apart; the rows of the streams are random."""
    rows = FIRST + LENGTH + 8
    side = torch.empty(rows * STRIDE, dtype=torch.float16).as_strided((rows, D), (STRIDE, 1))
    for start in WHERE.starts.tolist():
        side[start : start + LENGTH].normal_()
    return side


@pytest.fixture(scope="module")
def dense() -> Rows:
    torch.manual_seed(0)
    return Rows(Dense(wide()), Dense(wide()))


@pytest.fixture(scope="module")
def q() -> Tensor:
    return torch.randn(2, 4, D).half()


@pytest.mark.parametrize("where", [WHERE, LISTED], ids=["ranges", "listed"])
def test_attention(where: Ranges | Listed, dense: Rows, q: Tensor) -> None:
    result, expected = (function(q, dense, where, Options(0.2)) for function in (decode, reference.decode))
    assert all(torch.allclose(a, b, atol=ROUNDING) for a, b in zip(result, expected, strict=True))


def test_weights(dense: Rows, q: Tensor) -> None:
    arguments = (q, dense, WHERE, Options(0.2), "sum", None)
    result, expected = mass.receive(*arguments), mass_reference.receive(*arguments)
    for start in WHERE.starts.tolist():
        rows = slice(start, start + LENGTH)
        assert torch.allclose(result[rows], expected[rows], atol=ROUNDING)


def test_scores(dense: Rows, q: Tensor) -> None:
    arguments = (q, None, dense.keys, WHERE, "max", LENGTH)
    assert torch.allclose(scores.score(*arguments), scores_reference.score(*arguments), atol=ROUNDING)


def test_codes_of_many_rows_are_read(q: Tensor) -> None:
    """Rows of codes are adjacent, so there are many of them: 2**27 of 16 bytes."""
    rows = 2**31 // (D // 2) + LENGTH
    codes = torch.empty(rows, D // 2, dtype=torch.uint8)
    first = rows - LENGTH
    codes[first:].random_()
    scale = torch.full((1, D), 0.1, dtype=torch.float16)
    side = Packed(codes, scale, -scale, 4, (rows, 1))
    where = Ranges(torch.tensor([first]), torch.tensor([LENGTH]))
    result = decode(q[:1], Rows(side, side), where, Options(0.2))
    moved = replace(side, codes=codes[first:], group=(LENGTH, 1))
    expected = reference.decode(q[:1], Rows(moved, moved), Ranges(torch.tensor([0]), where.lengths), Options(0.2))
    assert all(torch.allclose(a, b, atol=ROUNDING) for a, b in zip(result, expected, strict=True))


def test_strided_rows_are_quantised() -> None:
    """A few rows, each far from the previous one."""
    stride = 2**28
    x = torch.empty(12 * stride).as_strided((12, D), (stride, 1))
    x.copy_(torch.randn(12, D))
    strided, contiguous = (quantisation.encode(rows, 4, (4, 1))[0] for rows in (x, x.clone()))
    assert torch.equal(strided.codes, contiguous.codes)
    assert torch.equal(strided.scale, contiguous.scale)
