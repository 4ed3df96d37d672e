# SPDX-License-Identifier: Apache-2.0
"""Long streams of rotated keys in codebooks of bytes, which models of 16 bits multiply as integers of 16 bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvpress.kernels import STEP, Coded, Options, Ranges, Rotary, Rows
from kvpress.kernels.attention import cpu, reference
from tests.kernels.builders import Streams, angle_tables, assert_same_lse, coded, relative_error, streams
from tests.kernels.compiler import LEVELS, needs_compiler

pytestmark = [needs_compiler, pytest.mark.parametrize("level", LEVELS)]

LENGTHS = [2500, 5, 2048, 0, 4001]
HALVES = [torch.float16, torch.bfloat16]


def standing(s: Streams, dim: int, gaps: bool, factor: float = 1.0) -> Rotary:
    """Return the angles of streams that begin at different positions; with `gaps`, after an eviction."""
    first, at = torch.tensor([0, 63, 1000, 7, 64]), torch.zeros(s.rows, dtype=torch.int64)
    for n, rows in enumerate(s.where.numbers()):
        at[rows] = first[n] + torch.randint(1, 5 if gaps else 2, (len(rows),)).cumsum(0) - 1
    tables = angle_tables(dim, 20000, factor)
    if gaps:
        return Rotary(*tables, torch.zeros_like(first), at.int())
    return Rotary(*tables, first - s.starts)


def problem(dim: int, coupled: int, dtype: torch.dtype, gaps: bool, queries: int = 4) -> tuple[Streams, Rows]:
    torch.manual_seed(0)
    s = streams(LENGTHS, queries, dim, dtype)
    keys, values = coded(s.rows, dim, coupled, 8), coded(s.rows, dim, coupled, 8)
    return s, Rows(replace(keys, rotary=standing(s, dim, gaps)), values)


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("coupled", [4, 8, 16])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)])
def test_models_of_16_bits_read_centroids_nearly_as_exactly(
    dim: int, dtype: torch.dtype, coupled: int, gaps: bool, level: str
) -> None:
    s, rows = problem(dim, coupled, dtype, gaps, queries=6)
    out, lse = cpu.decode(s.q, rows, s.where, Options(dim**-0.5), level=level)
    expected, total = reference.decode(s.q, rows, s.where, Options(dim**-0.5))
    assert relative_error(out, expected) < 1e-3
    assert_same_lse(lse, total, 1e-3)


@pytest.mark.parametrize("coupled", [4, 8])
def test_models_of_32_bits_read_them_exactly(coupled: int, level: str) -> None:
    s, rows = problem(64, coupled, torch.float32, False)
    out, lse = cpu.decode(s.q, rows, s.where, Options(0.125), level=level)
    expected, total = reference.decode(s.q, rows, s.where, Options(0.125))
    assert relative_error(out, expected) < 1e-5
    assert_same_lse(lse, total, 1e-5)


@pytest.mark.parametrize("dtype", HALVES)
def test_options_listed_rows_and_row_scales(dtype: torch.dtype, level: str) -> None:
    s, rows = problem(64, 4, dtype, False)
    scale = (0.2 + torch.rand(s.rows)).half()
    rows = replace(rows, keys=replace(rows.keys, row_scale=scale), log_weight=torch.randn(s.rows))
    stream = torch.tensor([3, 0, 1, 4, 2])
    for where in (s.where, s.listed(), replace(s.where, stream=stream)):
        if where.stream is not None:
            shift = torch.zeros(5, dtype=torch.int64).scatter_(0, stream, rows.keys.rotary.shift)  # type: ignore[union-attr]
            rows = replace(rows, keys=replace(rows.keys, rotary=replace(rows.keys.rotary, shift=shift)))  # type: ignore[type-var]
        options = Options(0.1, softcap=3.0, causal=0 if where is not s.where else 2)
        out, lse = cpu.decode(s.q, rows, where, options, level=level)
        expected, total = reference.decode(s.q, rows, where, options)
        assert relative_error(out, expected) < 1e-3
        assert_same_lse(lse, total, 1e-3)


def one_book(centroid: Tensor, rows: int) -> Coded:
    """Return codes that all select the same vector [D]."""
    book = centroid.view(1, -1, 1, 4).expand(-1, -1, 256, -1).half().contiguous()
    return Coded(torch.randint(0, 256, (rows, centroid.shape[0] // 4), dtype=torch.uint8), book, 8)


def unturned(dim: int, rows: int, shift: Tensor) -> Rotary:
    """Return angles of zero."""
    tables = torch.stack([torch.ones(dim // 2), torch.zeros(dim // 2)])
    return Rotary(tables.repeat(rows // STEP + 1, 1, 1), tables.repeat(STEP, 1, 1), shift)


@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("sign", [-1, 1])
def test_no_sum_of_whole_numbers_leaves_32_bits(sign: int, dim: int, level: str) -> None:
    """All queries, keys and weights have one sign and the largest size, so that nothing cancels."""
    rows = 3000
    q, where = torch.full((1, 4, dim), sign * 3.0).bfloat16(), Ranges(torch.tensor([0]), torch.tensor([rows]))
    side = one_book(torch.full((dim,), 15.0), rows)
    keys = replace(side, rotary=unturned(dim, rows, torch.tensor([0])))
    out, lse = cpu.decode(q, Rows(keys, side), where, Options(1e-3), level=level)
    torch.testing.assert_close(out, torch.full_like(out, 15.0), rtol=1e-3, atol=0)
    logit = sign * 3.0 * 15 * dim * 1e-3
    torch.testing.assert_close(lse, (logit + torch.tensor(3000.0).log()).expand_as(lse), rtol=1e-3, atol=0)


def test_a_channel_far_larger_than_the_others_leaves_them_their_digits(level: str) -> None:
    """Keys may have channels that are large and nearly constant, as in models with biases."""
    torch.manual_seed(0)
    s = streams([2500], 4, 64, torch.bfloat16)
    keys, values = coded(s.rows, 64, 4, 8, books=1), coded(s.rows, 64, 4, 8, books=1)
    book, scale = keys.book.clone(), torch.logspace(-3, 1, 64).view(1, 16, 1, 4)
    book[:, 3, :, 1] = 50 + book[:, 3, :, 1]
    values = replace(values, book=(values.book.float() * scale).half())
    rows = Rows(replace(keys, book=book, rotary=unturned(64, 2600, -s.starts)), values)
    out, _ = cpu.decode(s.q, rows, s.where, Options(0.1), level=level)
    expected, _ = reference.decode(s.q, rows, s.where, Options(0.1))
    for channel in range(64):
        assert relative_error(out[..., channel], expected[..., channel]) < 2e-3


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_queries_and_books_of_zero_and_one(value: float, level: str) -> None:
    rows = 2100
    q, where = torch.full((1, 3, 64), value).half(), Ranges(torch.tensor([0]), torch.tensor([rows]))
    side = one_book(torch.full((64,), value), rows)
    out, lse = cpu.decode(
        q, Rows(replace(side, rotary=unturned(64, rows, torch.tensor([0]))), side), where, Options(0.1), level=level
    )
    torch.testing.assert_close(out, torch.full_like(out, value), rtol=1e-3, atol=0)
    expected = 6.4 * value + torch.tensor(2100.0).log()
    torch.testing.assert_close(lse, expected.expand_as(lse), rtol=1e-3, atol=0)
