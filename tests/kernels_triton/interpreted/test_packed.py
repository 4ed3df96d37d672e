# SPDX-License-Identifier: Apache-2.0
"""Decode on packed codes in Triton against float32 attention over the decoded rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import Listed, Options, Packed, Rows, Where
from kvpress.kernels.attention import reference
from kvpress.kernels.attention.triton import decode
from tests.kernels.builders import correction, pack, quantise, quantise_centred, relative_error, streams
from tests.kernels_triton.interpreted.problems import LENGTHS, assert_close, lowest_precision

FOLDED, SHARED = (32, 1), (1, 32)


def check(q: Tensor, rows: Rows, where: Where, options: Options | None = None) -> None:
    options = options or Options(0.1)
    rounded = lowest_precision(q, rows, where, 0.1, torch.float16)
    plain_out, _ = reference.decode(q, replace(rows, log_weight=None), where, Options(0.1))
    expected = reference.decode(q, rows, where, options)
    assert_close(decode(q, rows, where, options), expected, expected[0] + rounded - plain_out)


@pytest.mark.parametrize(
    ("bits", "dim", "value_dim", "queries", "key_group", "value_group", "scales"),
    [
        (4, 64, 64, 4, FOLDED, SHARED, torch.float16),
        (4, 80, 80, 1, (16, 1), (1, 16), torch.float16),
        (4, 128, 128, 12, FOLDED, SHARED, torch.float32),
        (2, 128, 64, 4, (64, 1), SHARED, torch.float16),
        (2, 96, 96, 3, FOLDED, (1, 24), torch.float16),
        (3, 128, 80, 4, FOLDED, (1, 16), torch.float16),
        (1, 64, 128, 4, FOLDED, SHARED, torch.float16),
        (8, 128, 128, 1, SHARED, SHARED, torch.float16),
        (4, 128, 128, 4, (1, 128), (1, 128), torch.float32),
        (3, 64, 64, 8, (1, 64), (1, 64), torch.float16),
        (4, 64, 64, 4, (5, 4), FOLDED, torch.float32),
        (8, 192, 128, 1, FOLDED, SHARED, torch.float16),
        (4, 256, 256, 1, (128, 1), SHARED, torch.float16),
    ],
)
def test_matches_reference(
    bits: int,
    dim: int,
    value_dim: int,
    queries: int,
    key_group: tuple[int, int],
    value_group: tuple[int, int],
    scales: torch.dtype,
) -> None:
    s = streams(LENGTHS, queries, dim, torch.bfloat16)  # queries are only loaded and widened, which is exact
    keys, _ = quantise(torch.randn(s.rows, dim), bits, key_group, scales)
    values, _ = quantise(torch.randn(s.rows, value_dim), bits, value_group, scales)
    check(s.q, Rows(keys, values), s.where)


@pytest.mark.parametrize("options", [{"causal": 3}, {"softcap": 4.0}])
def test_options(options: dict[str, Any]) -> None:
    s = streams([*LENGTHS, 2], 6, 64)
    keys, _ = quantise(torch.randn(s.rows, 64), 4, FOLDED)
    values, _ = quantise(torch.randn(s.rows, 64), 2, SHARED)
    for log_weight in (None, torch.randn(s.rows)):
        check(s.q, Rows(keys, values, log_weight), s.where, Options(0.1, **options))


def random_lengths(rows: int, groups: int) -> Tensor:
    """Return as many rows of each group as evictions may leave, none of some."""
    return torch.randint(0, groups, (rows,)).bincount(minlength=groups).int()


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("value_group", [SHARED, FOLDED])
def test_select_and_lengths_of_groups(mapped: bool, value_group: tuple[int, int]) -> None:
    s = streams([100] * 4, 4, 64)
    keys, _ = quantise(torch.randn(s.rows, 64), 4, FOLDED)
    values, _ = quantise(torch.randn(s.rows, 64), 4, value_group)
    if mapped:
        keys, values = (
            side if side.group[0] == 1 else replace(side, group_lengths=random_lengths(s.rows, len(side.scale)))
            for side in (keys, values)
        )
    counts = torch.tensor([0, 70, 1, 33])
    rows = torch.stack([torch.randperm(s.rows)[:70] for _ in counts])
    rows[torch.arange(70) >= counts[:, None]] = 2**31
    for where in (Listed(rows, counts), s.where):
        check(s.q, Rows(keys, values, torch.randn(s.rows)), where)


@pytest.mark.parametrize(
    ("dim", "value_dim", "queries", "rank", "density", "chunk_rows", "key_group", "dtype"),
    [
        (64, 64, 4, 2, 0.02, 3, FOLDED, torch.float16),
        (80, 96, 1, 4, 0.0, 200, FOLDED, torch.float16),
        (128, 80, 3, 0, 0.3, 37, SHARED, torch.float16),
        (96, 64, 8, 16, 0.05, 20, FOLDED, torch.float32),
        (64, 192, 2, 1, 0.02, 64, (1, 64), torch.float32),
        (64, 160, 5, 7, 0.02, 90, FOLDED, torch.float16),
    ],
)
def test_corrections(
    dim: int,
    value_dim: int,
    queries: int,
    rank: int,
    density: float,
    chunk_rows: int,
    key_group: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    s = streams(LENGTHS, queries, dim, torch.float16)
    keys, _ = quantise(torch.randn(s.rows, dim), 2, key_group)
    values, _ = quantise(torch.randn(s.rows, value_dim), 4, (1, 16))
    keys = replace(keys, correction=correction(s.rows, dim, rank, density, chunk_rows, dtype)[0])
    values = replace(values, correction=correction(s.rows, value_dim, rank, density, chunk_rows + 5, dtype)[0])
    check(s.q, Rows(keys, values), s.where)


@pytest.mark.parametrize("side", ["keys", "values"])
def test_corrections_of_one_side_with_every_option(side: str) -> None:
    s = streams([*LENGTHS, 2], 6, 64, torch.float16)
    keys, _ = quantise(torch.randn(s.rows, 64), 4, FOLDED)
    values, _ = quantise(torch.randn(s.rows, 64), 2, SHARED)
    rows = Rows(keys, values, torch.randn(s.rows))
    rows = replace(rows, **{side: replace(getattr(rows, side), correction=correction(s.rows, 64, 2, 0.05)[0])})
    check(s.q, rows, s.where, Options(0.1, softcap=4.0, causal=3))


def test_corrections_of_listed_rows() -> None:
    s = streams([100] * 4, 4, 64, torch.float16)
    keys, _ = quantise(torch.randn(s.rows, 64), 4, FOLDED)
    values, _ = quantise(torch.randn(s.rows, 64), 4, SHARED)
    keys, values = (replace(side, correction=correction(s.rows, 64, 3, 0.05)[0]) for side in (keys, values))
    counts = torch.tensor([0, 70, 1, 33])
    rows = torch.stack([torch.randperm(s.rows)[:70] for _ in counts])
    rows[torch.arange(70) >= counts[:, None]] = 2**31
    check(s.q, Rows(keys, values), Listed(rows, counts))


def test_large_low_rank_terms_do_not_overflow() -> None:
    s = streams([60], 2, 64, torch.float16)
    keys, _ = quantise(torch.randn(s.rows, 64), 4, FOLDED)
    values, _ = quantise(torch.randn(s.rows, 64), 4, SHARED)
    terms, _ = correction(s.rows, 64, 2, 0.0)
    assert terms.factor is not None
    assert terms.basis is not None
    large = replace(terms, factor=terms.factor / 10000, basis=terms.basis * 10000)
    check(s.q, Rows(replace(keys, correction=large), replace(values, correction=large)), s.where)


def test_scales_of_rows_outside_the_streams_are_not_read() -> None:
    s = streams([17, 40], 2, 64)
    keys, _ = quantise(torch.randn(s.rows, 64), 4, (1, 64))
    values, _ = quantise(torch.randn(s.rows, 64), 4, (1, 64))
    for side in (keys, values):
        side.scale[s.unused()] = float("nan")
    args = (s.q, Rows(keys, values), s.where, Options(0.1))
    expected = reference.decode(*args)
    assert_close(decode(*args), expected, expected[0] * (1 + 1e-3))


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_large_and_small_keys_neither_overflow_nor_vanish(size: float) -> None:
    s = streams([60], 2, 64)
    keys, _ = quantise(torch.randn(s.rows, 64) * size, 4, FOLDED)
    values, _ = quantise(torch.randn(s.rows, 64), 4, SHARED)
    args = (s.q, Rows(keys, values), s.where, Options(0.1 / size))
    expected = reference.decode(*args)
    assert_close(decode(*args), expected, expected[0] * (1 + 1e-3))


@pytest.mark.parametrize(
    ("kind", "bits", "key_group", "value_group"),
    [
        (torch.float8_e4m3fn, 4, (1, 16), (1, 16)),
        (torch.float8_e8m0fnu, 4, (1, 32), (1, 32)),
        (torch.float16, 8, (1, 64), (1, 64)),
        (torch.float32, 3, FOLDED, SHARED),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_codes_stand_for_levels(
    kind: torch.dtype, bits: int, key_group: tuple[int, int], value_group: tuple[int, int], listed: bool
) -> None:
    s = streams(LENGTHS, 4, 64)

    def side(group: tuple[int, int]) -> Packed:
        scale = torch.exp2(torch.randint(-3, 2, (-(-s.rows // group[0]), 64 // group[1])).float()).to(kind)
        codes = torch.randint(0, 2**bits, (s.rows, 64), dtype=torch.uint8)
        return Packed(pack(codes, bits), scale, None, bits, group, levels=torch.randn(2**bits).half())

    check(s.q, Rows(side(key_group), side(value_group)), s.listed() if listed else s.where)


@pytest.mark.parametrize(
    ("bits", "dim", "queries", "width", "scales"),
    [
        (1, 64, 4, None, torch.float16),
        (2, 128, 4, None, torch.float16),
        (3, 64, 12, None, torch.float16),
        (4, 80, 1, None, torch.float32),
        (8, 64, 4, None, torch.float16),
        (4, 64, 4, 16, torch.float16),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_a_zero_point_needs_no_zeros(
    bits: int, dim: int, queries: int, width: int | None, scales: torch.dtype, listed: bool
) -> None:
    s = streams(LENGTHS, queries, dim, torch.float16)
    keys, _ = quantise_centred(torch.randn(s.rows, dim), bits, width, scales)
    values, _ = quantise_centred(torch.randn(s.rows, dim), bits, width, scales)
    check(s.q, Rows(keys, values), s.listed() if listed else s.where)


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_scales_of_values_of_any_size_neither_overflow_nor_blur(size: float) -> None:
    s = streams([200], 4, 64)
    s.q[..., 0] = 4
    keys, raw = torch.randn(s.rows, 64), size * torch.randn(s.rows, 64)
    keys[:, 0] = 0
    keys[s.starts, 0], raw[s.starts] = 18, 1e-3 * raw[s.starts]  # an attention sink with a short value
    (packed_keys, _), (values, _) = quantise(keys, 8, FOLDED), quantise_centred(raw, 4)
    args = (s.q, Rows(packed_keys, values), s.where, Options(0.1))
    expected = reference.decode(*args)
    assert relative_error(decode(*args)[0], expected[0]) < 1e-3


@pytest.mark.parametrize("group", [FOLDED, (1, 64)])
def test_keys_are_multiplied_by_the_factors_of_their_rows(group: tuple[int, int]) -> None:
    s = streams(LENGTHS, 4, 64)
    keys, _ = quantise(torch.randn(s.rows, 64), 4, group)
    values, _ = quantise(torch.randn(s.rows, 64), 2, SHARED)
    check(s.q, Rows(replace(keys, row_scale=torch.rand(s.rows).half() + 0.5), values), s.where)
