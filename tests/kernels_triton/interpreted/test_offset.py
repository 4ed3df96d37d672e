# SPDX-License-Identifier: Apache-2.0
"""Decode on keys with an offset in Triton, in every format, against the reference."""

from __future__ import annotations

import pytest

from kvpress.kernels import Options
from kvpress.kernels.attention import reference
from kvpress.kernels.attention.triton import decode
from tests.kernels.attention.test_offset import DIM, FORMATS, stored, with_offset
from tests.kernels.builders import assert_same_lse, relative_error, streams
from tests.kernels_triton.interpreted.problems import LENGTHS


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("straight", [True, False])
def test_matches_reference(name: str, straight: bool) -> None:
    s = streams(LENGTHS, 4, DIM)
    rows = with_offset(stored(name, s.rows), s, straight=straight)
    assert rows.key_offset is not None
    products = rows.key_offset.products(s.q, None)
    for where in (s.where, s.listed()):
        out, lse = decode(s.q, rows, where, Options(0.05), products)
        expected = reference.decode(s.q, rows, where, Options(0.05), products)
        assert relative_error(out, expected[0]) < 5e-3
        assert_same_lse(lse, expected[1], 1e-3)
