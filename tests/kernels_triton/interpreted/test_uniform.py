"""Decode on packed codes in Triton against float32 attention over the decoded rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import reference as plain
from kvpress.kernels.correction import Correction
from kvpress.kernels.packed import Packed, dequantise
from kvpress.kernels.triton.uniform import reference, uniform_decode, uniform_select
from tests.kernels.builders import correction, quantise, streams
from tests.kernels_triton.interpreted.problems import LENGTHS, assert_close, lowest_precision

FOLDED, SHARED = (32, 1), (1, 32)


def corrected(side: Packed, correction: Correction | None, group: Tensor | None) -> Tensor:
    every = torch.arange(side.codes.shape[0])
    exact = dequantise(side, every, group)
    return exact if correction is None else exact + correction.dense(every, exact.shape[1])


def check(ours: tuple[Tensor, Tensor], q: Tensor, keys: Packed, values: Packed, rows: list[Tensor], **kw: Any) -> None:
    group = kw.get("row_group")
    terms = {name: kw.get(name) for name in ("key_correction", "value_correction")}
    exact = corrected(keys, terms["key_correction"], group), corrected(values, terms["value_correction"], group)
    rounded = lowest_precision(q, *exact, rows, 0.1, torch.float16)
    plain_out, _ = reference(q, keys, values, rows, 0.1, row_group=group, **terms)
    expected = reference(q, keys, values, rows, 0.1, **kw)
    assert_close(ours, expected, expected[0] + rounded - plain_out)


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
    ours = uniform_decode(s.q, keys, values, s.starts, s.lengths, 0.1)
    check(ours, s.q, keys, values, plain.ranges(s.starts, s.lengths))


@pytest.mark.parametrize("options", [{"causal": 3}, {"softcap": 4.0}, {"causal": 3, "bias": True}])
def test_options(options: dict[str, Any]) -> None:
    s = streams([*LENGTHS, 2], 6, 64)
    keys, _ = quantise(torch.randn(s.rows, 64), 4, FOLDED)
    values, _ = quantise(torch.randn(s.rows, 64), 2, SHARED)
    if "bias" in options:
        options = {**options, "bias": torch.randn(s.rows)}
    ours = uniform_decode(s.q, keys, values, s.starts, s.lengths, 0.1, **options)
    check(ours, s.q, keys, values, plain.ranges(s.starts, s.lengths), **options)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("value_group", [SHARED, FOLDED])
def test_select_and_row_groups(mapped: bool, value_group: tuple[int, int]) -> None:
    s = streams([100] * 4, 4, 64)
    keys, _ = quantise(torch.randn(s.rows, 64), 4, FOLDED)
    values, _ = quantise(torch.randn(s.rows, 64), 4, value_group)
    group = torch.randint(0, keys.scale.shape[0], (s.rows,), dtype=torch.int32) if mapped else None
    counts = torch.tensor([0, 70, 1, 33])
    rows = torch.stack([torch.randperm(s.rows)[:70] for _ in counts])
    rows[torch.arange(70) >= counts[:, None]] = 2**31
    ours = uniform_select(s.q, keys, values, rows, counts, 0.1, row_group=group)
    check(ours, s.q, keys, values, plain.listed(rows, counts), row_group=group)
    ours = uniform_decode(s.q, keys, values, s.starts, s.lengths, 0.1, row_group=group)
    check(ours, s.q, keys, values, plain.ranges(s.starts, s.lengths), row_group=group)


@pytest.mark.parametrize(
    ("dim", "value_dim", "queries", "rank", "density", "chunk_rows", "key_group", "dtype"),
    [
        (64, 64, 4, 2, 0.02, 3, FOLDED, torch.float16),
        (80, 96, 1, 4, 0.0, 200, FOLDED, torch.float16),
        (128, 80, 3, 0, 0.3, 37, SHARED, torch.float16),
        (96, 64, 16, 16, 0.05, 20, FOLDED, torch.float32),
        (64, 192, 2, 1, 0.02, 64, (1, 64), torch.float32),
        (64, 256, 5, 7, 0.02, 90, FOLDED, torch.float16),
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
    terms = {
        "key_correction": correction(s.rows, dim, rank, density, chunk_rows, dtype)[0],
        "value_correction": correction(s.rows, value_dim, rank, density, chunk_rows + 5, dtype)[0],
    }
    ours = uniform_decode(s.q, keys, values, s.starts, s.lengths, 0.1, **terms)
    check(ours, s.q, keys, values, plain.ranges(s.starts, s.lengths), **terms)


@pytest.mark.parametrize("side", ["key_correction", "value_correction"])
def test_corrections_of_one_side_with_every_option(side: str) -> None:
    s = streams([*LENGTHS, 2], 6, 64, torch.float16)
    keys, _ = quantise(torch.randn(s.rows, 64), 4, FOLDED)
    values, _ = quantise(torch.randn(s.rows, 64), 2, SHARED)
    options = {side: correction(s.rows, 64, 2, 0.05)[0], "causal": 3, "softcap": 4.0, "bias": torch.randn(s.rows)}
    ours = uniform_decode(s.q, keys, values, s.starts, s.lengths, 0.1, **options)
    check(ours, s.q, keys, values, plain.ranges(s.starts, s.lengths), **options)


def test_corrections_of_listed_rows() -> None:
    s = streams([100] * 4, 4, 64, torch.float16)
    keys, _ = quantise(torch.randn(s.rows, 64), 4, FOLDED)
    values, _ = quantise(torch.randn(s.rows, 64), 4, SHARED)
    terms = {name: correction(s.rows, 64, 3, 0.05)[0] for name in ("key_correction", "value_correction")}
    counts = torch.tensor([0, 70, 1, 33])
    rows = torch.stack([torch.randperm(s.rows)[:70] for _ in counts])
    rows[torch.arange(70) >= counts[:, None]] = 2**31
    ours = uniform_select(s.q, keys, values, rows, counts, 0.1, **terms)
    check(ours, s.q, keys, values, plain.listed(rows, counts), **terms)


def test_large_low_rank_terms_do_not_overflow() -> None:
    s = streams([60], 2, 64, torch.float16)
    keys, _ = quantise(torch.randn(s.rows, 64), 4, FOLDED)
    values, _ = quantise(torch.randn(s.rows, 64), 4, SHARED)
    terms, _ = correction(s.rows, 64, 2, 0.0)
    assert terms.factor is not None
    assert terms.basis is not None
    large = replace(terms, factor=terms.factor / 10000, basis=terms.basis * 10000)
    options = {"key_correction": large, "value_correction": large}
    ours = uniform_decode(s.q, keys, values, s.starts, s.lengths, 0.1, **options)
    check(ours, s.q, keys, values, plain.ranges(s.starts, s.lengths), **options)


def test_scales_of_rows_outside_the_streams_are_not_read() -> None:
    s = streams([17, 40], 2, 64)
    keys, _ = quantise(torch.randn(s.rows, 64), 4, (1, 64))
    values, _ = quantise(torch.randn(s.rows, 64), 4, (1, 64))
    unused = torch.ones(s.rows, dtype=torch.bool)
    unused[torch.cat(plain.ranges(s.starts, s.lengths))] = False
    for side in (keys, values):
        side.scale[unused] = float("nan")
    ours = uniform_decode(s.q, keys, values, s.starts, s.lengths, 0.1)
    expected = reference(s.q, keys, values, plain.ranges(s.starts, s.lengths), 0.1)
    assert_close(ours, expected, expected[0] * (1 + 1e-3))


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_large_and_small_keys_neither_overflow_nor_vanish(size: float) -> None:
    s = streams([60], 2, 64)
    keys, _ = quantise(torch.randn(s.rows, 64) * size, 4, FOLDED)
    values, _ = quantise(torch.randn(s.rows, 64), 4, SHARED)
    ours = uniform_decode(s.q, keys, values, s.starts, s.lengths, 0.1 / size)
    expected = reference(s.q, keys, values, plain.ranges(s.starts, s.lengths), 0.1 / size)
    assert_close(ours, expected, expected[0] * (1 + 1e-3))


def sides() -> dict[str, Any]:
    keys, _ = quantise(torch.randn(40, 16), 4, FOLDED)
    values, _ = quantise(torch.randn(40, 16), 4, (1, 16))
    return {"keys": keys, "values": values}


BAD = {
    "q must be": ("q", torch.zeros(2, 4, 16, dtype=torch.int32)),
    "key_bits must be one of": ("keys", {"bits": 5}),
    "key_codes must be uint8": ("keys", {"codes": torch.zeros(40, 9, dtype=torch.uint8)}),
    "value_codes must be uint8 \\[40": ("values", {"codes": torch.zeros(39, 8, dtype=torch.uint8)}),
    "key_group must be": ("keys", {"group": (32, 3)}),
    "key_scale must be float16/float32 \\[2, 16\\]": ("keys", {"scale": torch.zeros(1, 16).half()}),
    "value_zero must be float16": ("values", {"zero": torch.zeros(40, 1)}),
    "value_scale must be contiguous": ("values", {"scale": torch.zeros(80, 1).half()[::2]}),
    "row_group must be int32 \\[40\\]": ("row_group", torch.zeros(40, dtype=torch.int64)),
    "softcap must be positive": ("softcap", -1.0),
    "causal must be 0 or divide": ("causal", 3),
    "bias must be float32 \\[40\\]": ("bias", torch.zeros(39)),
    "starts must be int64": ("starts", torch.zeros(3, dtype=torch.int64)),
    "lengths must be int64": ("lengths", torch.zeros(2, dtype=torch.int32)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str) -> None:
    name, bad = BAD[message]
    stream = torch.zeros(2, dtype=torch.int64)
    args: dict[str, Any] = {"q": torch.zeros(2, 4, 16), **sides(), "starts": stream, "lengths": stream, "scale": 1.0}
    args[name] = replace(args[name], **bad) if isinstance(bad, dict) else bad
    with pytest.raises(ValueError, match=message):
        uniform_decode(**args)


def test_bad_selections_are_named() -> None:
    rows, counts = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="rows must be int32/int64"):
        uniform_select(torch.zeros(2, 4, 16), **sides(), rows=rows.float(), counts=counts, scale=1.0)
    with pytest.raises(ValueError, match="counts must be int64"):
        uniform_select(torch.zeros(2, 4, 16), **sides(), rows=rows, counts=counts.int(), scale=1.0)
