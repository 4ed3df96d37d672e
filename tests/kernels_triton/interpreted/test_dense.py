# SPDX-License-Identifier: Apache-2.0
"""Dense decode in Triton against float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpress.kernels import Listed, Options, Ranges
from kvpress.kernels.attention import reference
from kvpress.kernels.attention.triton import decode
from kvpress.kernels.attention.triton import dense as launcher
from tests.kernels.builders import dense, relative_error, streams
from tests.kernels_triton.interpreted.problems import LENGTHS, assert_close, lowest_precision, poison


@pytest.mark.parametrize(
    ("dim", "value_dim", "group", "tokens", "dtype"),
    [
        (64, 64, 1, 1, torch.float32),
        (64, 80, 4, 3, torch.float16),
        (80, 80, 1, 3, torch.float32),
        (96, 128, 4, 1, torch.float16),
        (128, 128, 4, 3, torch.float32),
        (128, 128, 4, 1, torch.float16),
        (192, 128, 1, 1, torch.float16),
        (256, 256, 2, 1, torch.float16),
    ],
)
def test_matches_reference(dim: int, value_dim: int, group: int, tokens: int, dtype: torch.dtype) -> None:
    s = streams(LENGTHS, group * tokens, dim, dtype)
    keys, values = torch.randn(s.rows, dim).to(dtype), torch.randn(s.rows, value_dim).to(dtype)
    poison(s, keys, values)
    args = (s.q, dense(keys, values), s.where)
    rounded = lowest_precision(*args, dim**-0.5, dtype)
    assert_close(decode(*args, Options(dim**-0.5)), reference.decode(*args, Options(dim**-0.5)), rounded)


@pytest.mark.parametrize(
    "options",
    [{"causal": 1}, {"causal": 3}, {"softcap": 4.0}, {}, {"causal": 3, "softcap": 4.0}],
)
def test_options(options: dict[str, Any]) -> None:
    s = streams([*LENGTHS, 2], 6, 64)
    keys, values = torch.randn(s.rows, 64), torch.randn(s.rows, 64)
    log_weight = torch.randn(s.rows).masked_fill(torch.rand(s.rows) < 0.3, float("-inf"))
    for weights in (None, log_weight):
        args = (s.q, dense(keys, values, weights), s.where, Options(0.3, **options))
        expected = reference.decode(*args)
        assert_close(decode(*args), expected, expected[0])


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_select(index: torch.dtype) -> None:
    s = streams([100] * 4, 4, 64)
    rows = dense(torch.randn(s.rows, 64), torch.randn(s.rows, 80), torch.randn(s.rows))
    counts = torch.tensor([0, 70, 1, 33])
    numbers = torch.stack([torch.randperm(s.rows)[:70] for _ in counts]).to(index)
    numbers[torch.arange(70) >= counts[:, None]] = 2**31 - 1
    args = (s.q, rows, Listed(numbers, counts), Options(0.2, softcap=5.0))
    expected = reference.decode(*args)
    assert_close(decode(*args), expected, expected[0])


def test_strided_rows() -> None:
    s = streams([40, 0, 65], 4, 64)
    wide = torch.full((s.rows, 160), float("nan"))
    wide[:, :144] = torch.randn(s.rows, 144)
    keys, values = wide[:, :64], wide[:, 64:144]
    args = (s.q, dense(keys, values), s.where, Options(0.1))
    expected = reference.decode(*args)
    assert_close(decode(*args), expected, expected[0])


@pytest.mark.parametrize("resident", [1, 4, 64])
def test_result_does_not_depend_on_the_number_of_splits(resident: int, monkeypatch: pytest.MonkeyPatch) -> None:
    s = streams([1, 0, 500], 4, 64)
    keys, values = torch.randn(s.rows, 64), torch.randn(s.rows, 64)
    monkeypatch.setattr(launcher, "RESIDENT", resident)
    args = (s.q, dense(keys, values), s.where, Options(0.1))
    expected = reference.decode(*args)
    assert_close(decode(*args), expected, expected[0])


def test_a_long_tail_of_small_weights_survives_half_precision() -> None:
    s = streams([400], 1, 64, torch.float16)
    s.q.fill_(1.0)
    keys, values = torch.zeros(s.rows, 64).half(), torch.ones(s.rows, 64).half()
    start = int(s.starts[0])
    keys[start], values[start] = 0.25, 0.0  # a sink whose logit is 16 above all others: weights of 1e-7
    args = (s.q, dense(keys, values), s.where, Options(1.0))
    assert relative_error(decode(*args)[0], reference.decode(*args)[0]) < 1e-3


def test_many_queries_take_several_tiles() -> None:
    s = streams([90], 70, 64)
    keys, values = torch.randn(s.rows, 64), torch.randn(s.rows, 64)
    args = (s.q, dense(keys, values), s.where, Options(0.1, causal=35))
    expected = reference.decode(*args)
    assert_close(decode(*args), expected, expected[0])


def test_nothing_to_do() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    rows = dense(torch.zeros(0, 64), torch.zeros(0, 32))
    out, lse = decode(torch.zeros(0, 4, 64), rows, Ranges(nothing, nothing), Options(1.0))
    assert out.shape == (0, 4, 32)
    assert lse.shape == (0, 4)
