"""Dense decode in Triton against float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpress.kernels import reference as plain
from kvpress.kernels.triton import grid
from kvpress.kernels.triton.dense import dense_decode, dense_select, reference
from tests.kernels.builders import relative_error, streams
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
    rows = plain.ranges(s.starts, s.lengths)
    ours = dense_decode(s.q, keys, values, s.starts, s.lengths, dim**-0.5)
    rounded = lowest_precision(s.q, keys, values, rows, dim**-0.5, dtype)
    assert_close(ours, reference(s.q, keys, values, rows, dim**-0.5), rounded)


@pytest.mark.parametrize(
    "options",
    [{"causal": 1}, {"causal": 3}, {"softcap": 4.0}, {"bias": True}, {"causal": 3, "softcap": 4.0, "bias": True}],
)
def test_options(options: dict[str, Any]) -> None:
    s = streams([*LENGTHS, 2], 6, 64)
    keys, values = torch.randn(s.rows, 64), torch.randn(s.rows, 64)
    if "bias" in options:
        options = {**options, "bias": torch.randn(s.rows).masked_fill(torch.rand(s.rows) < 0.3, float("-inf"))}
    out, lse = dense_decode(s.q, keys, values, s.starts, s.lengths, 0.3, **options)
    expected, expected_lse = reference(s.q, keys, values, plain.ranges(s.starts, s.lengths), 0.3, **options)
    assert_close((out, lse), (expected, expected_lse), expected)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_select(index: torch.dtype) -> None:
    s = streams([100] * 4, 4, 64)
    keys, values, bias = torch.randn(s.rows, 64), torch.randn(s.rows, 80), torch.randn(s.rows)
    counts = torch.tensor([0, 70, 1, 33])
    rows = torch.stack([torch.randperm(s.rows)[:70] for _ in counts]).to(index)
    rows[torch.arange(70) >= counts[:, None]] = 2**31 - 1
    ours = dense_select(s.q, keys, values, rows, counts, 0.2, softcap=5.0, bias=bias)
    expected = reference(s.q, keys, values, plain.listed(rows, counts), 0.2, 5.0, 0, bias)
    assert_close(ours, expected, expected[0])


def test_strided_rows() -> None:
    s = streams([40, 0, 65], 4, 64)
    wide = torch.full((s.rows, 160), float("nan"))
    wide[:, :144] = torch.randn(s.rows, 144)
    keys, values = wide[:, :64], wide[:, 64:144]
    expected = reference(s.q, keys, values, plain.ranges(s.starts, s.lengths), 0.1)
    assert_close(dense_decode(s.q, keys, values, s.starts, s.lengths, 0.1), expected, expected[0])


@pytest.mark.parametrize("waves", [1, 4, 64])
def test_result_does_not_depend_on_the_number_of_splits(waves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    s = streams([1, 0, 500], 4, 64)
    keys, values = torch.randn(s.rows, 64), torch.randn(s.rows, 64)
    monkeypatch.setattr(grid, "WAVES", waves)
    expected = reference(s.q, keys, values, plain.ranges(s.starts, s.lengths), 0.1)
    assert_close(dense_decode(s.q, keys, values, s.starts, s.lengths, 0.1), expected, expected[0])


def test_a_long_tail_of_small_weights_survives_half_precision() -> None:
    s = streams([400], 1, 64, torch.float16)
    s.q.fill_(1.0)
    keys, values = torch.zeros(s.rows, 64).half(), torch.ones(s.rows, 64).half()
    start = int(s.starts[0])
    keys[start], values[start] = 0.25, 0.0  # a sink whose logit is 16 above all others: weights of 1e-7
    out, _ = dense_decode(s.q, keys, values, s.starts, s.lengths, 1.0)
    expected, _ = reference(s.q, keys, values, plain.ranges(s.starts, s.lengths), 1.0)
    assert relative_error(out, expected) < 1e-3


def test_many_queries_take_several_tiles() -> None:
    s = streams([90], 70, 64)
    keys, values = torch.randn(s.rows, 64), torch.randn(s.rows, 64)
    expected = reference(s.q, keys, values, plain.ranges(s.starts, s.lengths), 0.1, None, 35)
    assert_close(dense_decode(s.q, keys, values, s.starts, s.lengths, 0.1, causal=35), expected, expected[0])


def test_nothing_to_do() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    out, lse = dense_decode(torch.zeros(0, 4, 64), torch.zeros(0, 64), torch.zeros(0, 32), nothing, nothing, 1.0)
    assert out.shape == (0, 4, 32)
    assert lse.shape == (0, 4)


BAD = {
    "q must be": {"q": torch.zeros(2, 4, 8, dtype=torch.int32)},
    "keys must be .* 8\\], got float32 \\[20, 9\\]": {"keys": torch.zeros(20, 9)},
    "values must be .* \\[20, Dv\\]": {"values": torch.zeros(19, 8)},
    "values must be float32": {"values": torch.zeros(20, 8).half()},
    "keys must be contiguous": {"keys": torch.zeros(8, 20).T},
    "values must be contiguous": {"values": torch.zeros(8, 20).T},
    "starts must be int64 \\[2\\]": {"starts": torch.zeros(3, dtype=torch.int64)},
    "lengths must be int64": {"lengths": torch.zeros(2, dtype=torch.int32)},
    "softcap must be positive or None, got 0.0": {"softcap": 0.0},
    "causal must be 0 or divide the 4 query rows, got 3": {"causal": 3},
    "bias must be float32 \\[20\\]": {"bias": torch.zeros(19)},
    "all tensors must be on cpu": {"keys": torch.zeros(20, 8, device="meta")},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str) -> None:
    stream = torch.zeros(2, dtype=torch.int64)
    rows = torch.zeros(20, 8)
    args: dict[str, Any] = {
        "q": torch.zeros(2, 4, 8),
        "keys": rows,
        "values": rows,
        "starts": stream,
        "lengths": stream,
    }
    with pytest.raises(ValueError, match=message):
        dense_decode(**(args | {"scale": 1.0} | BAD[message]))


@pytest.mark.parametrize(
    ("message", "bad"),
    [
        ("rows must be int32/int64", {"rows": torch.zeros(2, 3)}),
        ("counts must be int64", {"counts": torch.zeros(2, dtype=torch.int32)}),
    ],
)
def test_bad_selections_are_named(message: str, bad: dict[str, Any]) -> None:
    keys = torch.zeros(20, 8)
    rows, counts = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    args: dict[str, Any] = {"q": torch.zeros(2, 4, 8), "keys": keys, "values": keys, "rows": rows, "counts": counts}
    with pytest.raises(ValueError, match=message):
        dense_select(**(args | {"scale": 1.0} | bad))
