# SPDX-License-Identifier: Apache-2.0
"""Decode on coupled codes in Triton against float32 attention over the decoded rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpress.kernels import STEP, Listed, Options, Rotary, Rows
from kvpress.kernels.attention import reference
from kvpress.kernels.attention.triton import decode
from tests.kernels.builders import Streams, coded, correction, streams
from tests.kernels_triton.interpreted.problems import LENGTHS, assert_close, lowest_precision
from tests.pairwise import every_pair


def rotary(s: Streams, half: int, listed: bool = True) -> Rotary:
    """Return scattered positions in five blocks, or runs that cross them."""
    tables = (10 * torch.rand(size, half) for size in (5, STEP))
    coarse, fine = (torch.stack([angle.cos(), angle.sin()], dim=1) for angle in tables)
    if not listed:
        return Rotary(coarse, fine, STEP - 5 - s.starts)
    return Rotary(coarse, fine, torch.randint(0, 9, s.starts.shape), torch.randint(0, 300, (s.rows,)).int())


@pytest.mark.parametrize(
    ("dim", "value_dim", "coupled", "bits", "entries", "queries"),
    [
        (64, 64, 4, 8, 256, 4),
        (128, 80, 8, 8, 200, 16),
        (64, 96, 1, 1, 2, 1),
        (80, 64, 1, 2, 3, 2),
        (96, 64, 1, 3, 8, 3),
        (64, 128, 2, 4, 16, 1),
        (128, 64, 2, 3, 8, 2),
        (192, 64, 3, 9, 400, 4),
        (64, 64, 2, 10, 1024, 4),
        (256, 64, 4, 12, 4096, 1),
    ],
)
def test_matches_reference(dim: int, value_dim: int, coupled: int, bits: int, entries: int, queries: int) -> None:
    s = streams(LENGTHS, queries, dim)
    keys = coded(s.rows, dim, coupled, bits, entries=entries, books=2, dtype=torch.float32)
    values = coded(s.rows, value_dim, 2, bits, books=2, dtype=torch.float32)
    args = (s.q, Rows(keys, values), s.where, Options(0.1))
    expected = reference.decode(*args)
    assert_close(decode(*args), expected, expected[0])


@pytest.mark.parametrize(
    ("dim", "coupled", "bits", "half", "dtype", "listed"),
    [
        (64, 4, 8, 32, torch.float16, True),
        (64, 4, 8, 32, torch.float16, False),
        (64, 1, 4, 32, torch.float32, True),
        (80, 2, 3, 20, torch.float32, False),
        (128, 8, 8, 16, torch.float16, True),
        (96, 3, 10, 20, torch.float32, False),
        (96, 3, 10, 20, torch.float32, True),
        (48, 8, 8, 12, torch.float32, False),
        (64, 4, 8, 0, torch.float16, False),
        (64, 4, 8, 0, torch.float16, True),
    ],
)
def test_keys_are_rotated_as_they_are_read(
    dim: int, coupled: int, bits: int, half: int, dtype: torch.dtype, listed: bool
) -> None:
    s = streams(LENGTHS, 4, dim, dtype)
    keys, values = (coded(s.rows, dim, c, bits, books=1, dtype=dtype) for c in (coupled, 1 if bits < 8 else 2))
    turn, unused = rotary(s, half, listed), s.unused()
    for side in (keys, values):  # rows of no stream have codes past every codebook
        side.codes[unused] = 255
    if turn.positions is not None:
        turn.positions[unused] = 2**31 - 1
    args = (s.q, Rows(replace(keys, rotary=turn), values), s.where)
    expected = reference.decode(*args, Options(0.1))
    assert_close(decode(*args, Options(0.1)), expected, lowest_precision(*args, 0.1, dtype))


@pytest.mark.parametrize(("half", "listed"), [(0, True), (16, True), (32, False), (20, False)])
@pytest.mark.parametrize("coupled", [1, 3])
def test_outliers_are_added_and_rotated_with_their_keys(half: int, listed: bool, coupled: int) -> None:
    s = streams(LENGTHS, 4, 96)
    keys, values = coded(s.rows, 96, coupled, 4), coded(s.rows, 48, coupled, 4, shared=True)
    (terms, _), (value_terms, _) = correction(s.rows, 96, 0, 0.1), correction(s.rows, 48, 0, 0.05)
    keys = replace(keys, correction=terms, rotary=rotary(s, half, listed) if half else None)
    values = replace(values, correction=value_terms, row_scale=torch.rand(s.rows) + 0.5)
    args = (s.q, Rows(keys, values), s.where)
    expected = reference.decode(*args, Options(0.1))
    assert_close(decode(*args, Options(0.1)), expected, lowest_precision(*args, 0.1, torch.float16))


@pytest.mark.parametrize("options", [{"causal": 3}, {"softcap": 4.0}])
def test_options(options: dict[str, Any]) -> None:
    s = streams([*LENGTHS, 2], 6, 64)
    keys, values = (coded(s.rows, 64, 4, 8, entries=32, dtype=torch.float32) for _ in range(2))
    for log_weight in (None, torch.randn(s.rows)):
        args = (s.q, Rows(keys, values, log_weight), s.where, Options(0.2, **options))
        expected = reference.decode(*args)
        assert_close(decode(*args), expected, expected[0])


@pytest.mark.parametrize(("half", "numbered"), [(0, True), (16, True), (16, False)])
@pytest.mark.parametrize("shared", [False, True])
def test_listed_rows_of_several_tokens_per_stream(half: int, numbered: bool, shared: bool) -> None:
    s = streams([100] * 4, 4, 64)
    keys = coded(s.rows, 64, 4, 8, books=4, dtype=torch.float32, shared=shared)
    values = coded(s.rows, 80, 1, 4, books=4, dtype=torch.float32, shared=shared)
    if half:
        keys = replace(keys, rotary=rotary(s, half, numbered))
    stream, counts = torch.tensor([3, 3, 1, 0, 0]), torch.tensor([0, 70, 1, 33, 64])
    numbers = torch.stack([s.starts[n] + torch.randperm(100)[:70] for n in stream]).int()
    numbers[torch.arange(70) >= counts[:, None]] = 2**31 - 1
    where, options = Listed(numbers, counts, stream), Options(0.2, softcap=5.0)
    args = (torch.randn(5, 4, 64), Rows(keys, values, torch.randn(s.rows)), where, options)
    expected = reference.decode(*args)
    assert_close(decode(*args), expected, expected[0])


@every_pair(
    half=[0, 16], shared=[False, True], scales=[torch.float32, torch.bfloat16], dtype=[torch.float32, torch.float16]
)
def test_row_scales(half: int, shared: bool, scales: torch.dtype, dtype: torch.dtype) -> None:
    s = streams(LENGTHS, 4, 64, dtype)
    sides = [coded(s.rows, 64, 1, 4, dtype=dtype, shared=shared) for _ in range(2)]
    keys, values = (replace(side, row_scale=(0.1 + 2 * torch.rand(s.rows)).to(scales)) for side in sides)
    for side in (keys, values):
        side.row_scale[s.unused()] = float("nan")
    if half:
        keys = replace(keys, rotary=rotary(s, half))
    args = (s.q, Rows(keys, values), s.where)
    expected = reference.decode(*args, Options(0.2))
    rounded = expected[0] if dtype == torch.float32 else lowest_precision(*args, 0.2, dtype)
    assert_close(decode(*args, Options(0.2)), expected, rounded)


def test_a_code_past_the_book_names_its_last_entry() -> None:
    s = streams([40], 4, 64)
    keys, values = coded(s.rows, 64, 4, 8, entries=200), coded(s.rows, 64, 4, 8, entries=10)
    args = (s.q, Rows(keys, values), s.where, Options(0.1))
    keys.codes[::3], values.codes[::2] = 250, 10
    past = decode(*args)
    keys.codes[::3], values.codes[::2] = 199, 9
    assert torch.equal(decode(*args)[0], past[0])
