# SPDX-License-Identifier: Apache-2.0
"""Queries and outputs in another basis: Triton against plain torch."""

from __future__ import annotations

import pytest
import torch

from kvpress.kernels import Basis, Dense, Options, Rows, decode
from kvpress.kernels.attention.triton import attend
from kvpress.kernels.attention.triton import basis as kernels
from tests.kernels.builders import assert_same_lse, relative_error, streams

STREAMS, QUERIES = 3, 17
OWNERS = torch.tensor([2, 0, 2, 1])
FACTOR = 0.3


def drawn(dim: int, channels: int, fields: str) -> Basis:
    return Basis(
        torch.rand(STREAMS, channels) + 0.5 if "scale" in fields else None,
        torch.randn(dim, channels) if "rotation" in fields else None,
        torch.randn(STREAMS, dim).bfloat16() if "centre" in fields else None,
    )


@pytest.mark.parametrize("fields", ["rotation", "scale", "rotation, centre", "scale, rotation, centre", "centre"])
@pytest.mark.parametrize(("dim", "channels"), [(64, 64), (80, 80), (96, 192)])
@pytest.mark.parametrize("owners", [None, OWNERS])
def test_bases_match_plain_torch(fields: str, dim: int, channels: int, owners: torch.Tensor | None) -> None:
    channels = channels if "rotation" in fields else dim
    basis, streams = drawn(dim, channels, fields), STREAMS if owners is None else len(owners)
    q = torch.randn(streams, QUERIES, dim).bfloat16()
    entered, shift = kernels.enter(q, basis, owners, FACTOR)
    assert relative_error(entered, basis.enter(q, owners).float()) < 1e-6
    if basis.centre is None:
        assert shift is None
    else:
        assert relative_error(shift, FACTOR * basis.products(q, owners)) < 1e-6

    out, lse = torch.randn(streams, QUERIES, channels), torch.randn(streams, QUERIES)
    out[1, :5], lse[1, :5] = 0, float("-inf")
    left, shifted = kernels.leave(out, lse, basis, owners, shift)
    expected = basis.leave(out, owners).masked_fill(lse.isneginf()[..., None], 0.0)
    assert relative_error(left, expected) < 1e-6
    assert_same_lse(shifted, lse if shift is None else lse + shift, 1e-6)


@pytest.mark.parametrize("fields", ["rotation, centre", "scale, rotation", "centre"])
def test_rows_in_a_basis_are_read_as_in_plain_torch(fields: str) -> None:
    lengths = [0, 300, 17]
    s = streams(lengths, 4, 64, torch.float16)
    rows = Rows(
        *(Dense(torch.randn(s.rows, 64).half()) for _ in range(2)),
        key_basis=drawn(64, 64, fields), value_basis=drawn(64, 64, fields),
    )  # fmt: skip
    out, lse = attend(s.q, rows, s.where, Options(0.05))
    expected, expected_lse = decode(s.q, rows, s.where, Options(0.05))
    assert relative_error(out, expected) < 4e-3
    assert_same_lse(lse, expected_lse, 4e-3)
