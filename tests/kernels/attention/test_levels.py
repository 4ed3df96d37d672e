# SPDX-License-Identifier: Apache-2.0
"""Decode on codes that are indices of levels, with scales of eight bits, without zeros, and with factors of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpress.kernels import Options, Packed, Ranges, Rows, decode
from kvpress.kernels.attention import cpu, reference
from tests.kernels.builders import Streams, dense, quantise, relative_error, streams
from tests.kernels.builders import pack as pack_codes
from tests.kernels.compiler import LEVELS, needs_compiler

pytestmark = needs_compiler

KINDS = {
    "e4m3": torch.float8_e4m3fn,
    "e8m0": torch.float8_e8m0fnu,
    "float16": torch.float16,
    "float32": torch.float32,
}


def levelled(rows: int, dim: int, bits: int, group: tuple[int, int], kind: str) -> Packed:
    """Return random codes of random levels; scales cover the useful range of their dtype."""
    codes = torch.randint(0, 2**bits, (rows, dim), dtype=torch.uint8)
    scale = torch.exp2(torch.randint(-9, 5, (-(-rows // group[0]), dim // group[1])).float())
    scale = (scale * (1 if kind == "e8m0" else 1.25)).to(KINDS[kind])
    return Packed(pack_codes(codes, bits), scale, None, bits, group, levels=torch.randn(2**bits).half())


def problem(kind: str, bits: int = 4, group: tuple[int, int] = (1, 16), dim: int = 64) -> tuple[Streams, Rows]:
    torch.manual_seed(0)
    s = streams([0, 1, 70, 300], 4, dim)
    keys, values = (levelled(s.rows, dim, bits, g, kind) for g in (group, (1, 32)))
    return s, Rows(keys, values)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kind", "bits", "group"), [
    ("e4m3", 4, (1, 16)), ("e8m0", 4, (1, 32)), ("float16", 8, (1, 64)), ("float32", 3, (32, 1)), ("float16", 2, (32, 1)),
    ("e4m3", 1, (8, 8)), ("e4m3", 3, (1, 32)), ("float16", 2, (1, 16)), ("e8m0", 4, (4, 64)),
])  # fmt: skip
def test_every_level_reads_the_decoded_rows(kind: str, bits: int, group: tuple[int, int], level: str) -> None:
    s, rows = problem(kind, bits, group)
    every = torch.arange(rows.count)
    plain = dense(rows.keys.read(every), rows.values.read(every))
    for where in (s.where, s.listed()):
        out, lse = cpu.decode(s.q, rows, where, Options(0.1), level=level)
        expected, total = reference.decode(s.q, plain, s.where, Options(0.1))
        assert relative_error(out, expected) < 1e-5
        torch.testing.assert_close(lse, total, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("kind", "bits", "groups"), [
    ("e4m3", 4, (16, 16)), ("e8m0", 4, (32, 32)), ("float16", 2, (128, 64)), ("e4m3", 3, (4, 32)), ("e8m0", 1, (8, 128)),
    ("e4m3", 4, (32, 8)), ("e8m0", 4, (128, 128)),
])  # fmt: skip
def test_models_of_16_bits_read_levels_nearly_as_exactly(
    kind: str, bits: int, groups: tuple[int, int], dtype: torch.dtype, level: str
) -> None:
    torch.manual_seed(0)
    for queries in (1, 3, 4, 6):
        s = streams([0, 1, 70, 300], queries, 128, dtype)
        rows = Rows(*(levelled(s.rows, 128, bits, (1, width), kind) for width in groups))
        for where in (s.where, s.listed()):
            args = (s.q, rows, where, Options(0.02))
            out, lse = cpu.decode(*args, level=level)
            expected, total = reference.decode(*args)
            assert relative_error(out, expected) < 1e-3
            torch.testing.assert_close(lse, total, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("sign", [-1, 1])
def test_no_sum_of_whole_numbers_leaves_32_bits(sign: int, level: str) -> None:
    """All queries, all weights and all levels have one sign and the largest size, so that nothing cancels."""
    s = streams([256, 700], 4, 256, torch.bfloat16)
    s.q.fill_(sign * 3.0)
    codes = torch.full((s.rows, 128), 255, dtype=torch.uint8)
    scale = torch.ones(s.rows, 1).half()
    levels = torch.arange(16.0).half()
    side = Packed(codes, scale, None, 4, (1, 256), levels=levels)
    out, lse = cpu.decode(s.q, Rows(side, side), s.where, Options(1e-3), level=level)
    torch.testing.assert_close(out, torch.full_like(out, 15.0), rtol=1e-3, atol=0)
    logit = sign * 3.0 * 15 * 256 * 1e-3
    torch.testing.assert_close(lse, (logit + s.lengths.float().log())[:, None].expand_as(lse), rtol=1e-3, atol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_levels_and_queries_of_zero_and_one(value: float, level: str) -> None:
    s = streams([1, 40], 2, 64, torch.float16)
    s.q.fill_(value)
    side = Packed(
        torch.zeros(s.rows, 32, dtype=torch.uint8),
        torch.ones(s.rows, 1).half(),
        None,
        4,
        (1, 64),
        levels=torch.full((16,), value).half(),
    )
    out, _ = cpu.decode(s.q, Rows(side, side), s.where, Options(1.0), level=level)
    torch.testing.assert_close(out, torch.full_like(out, value), rtol=1e-3, atol=0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [(32, 1), (1, 64)])
def test_keys_are_multiplied_by_the_factors_of_their_rows(
    group: tuple[int, int], dtype: torch.dtype, level: str
) -> None:
    torch.manual_seed(0)
    s = streams([0, 1, 70, 300], 4, 64)
    keys, exact = quantise(torch.randn(s.rows, 64), 4, group)
    values, plain = quantise(torch.randn(s.rows, 64), 4, (1, 32))
    factor = (torch.rand(s.rows) + 0.2).to(dtype)
    rows = Rows(replace(keys, row_scale=factor), values)
    expected, total = reference.decode(s.q, dense(exact * factor.float()[:, None], plain), s.where, Options(0.1))
    out, lse = cpu.decode(s.q, rows, s.where, Options(0.1), level=level)
    # Integer kernels round queries to 16 bits.
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(lse, total, atol=2e-3, rtol=2e-3)
    out, lse = reference.decode(s.q, rows, s.where, Options(0.1))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dim", [64, 72])
def test_every_number_of_e4m3_is_read(dim: int, level: str) -> None:
    torch.manual_seed(0)
    s = streams([0, 1, 70, 300], 5, dim)
    every = torch.arange(256, dtype=torch.uint8)
    levels = torch.where(every % 128 == 127, 480 * (1 - every.half() // 128 * 2), every.view(KINDS["e4m3"]).half())
    sides = []
    for _ in range(2):
        codes = torch.randint(0, 256, (s.rows, dim), dtype=torch.uint8)
        codes[codes % 128 > 90] //= 8  # few large values, many subnormal ones
        codes[-1, :64], codes[-2, :64], codes[-3, :64], codes[-4, :64] = every.view(4, 64)
        scale = (torch.rand(s.rows, 1) + 0.1).half() / 8
        sides.append(Packed(codes, scale, None, 8, (1, dim), levels=levels))
    rows = Rows(*sides)
    for where in (s.where, s.listed()):
        out, lse = cpu.decode(s.q, rows, where, Options(0.02), level=level)
        expected, total = reference.decode(s.q, rows, s.where, Options(0.02))
        assert relative_error(out, expected) < 1e-5
        torch.testing.assert_close(lse, total, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_all_scales_of_eight_bits_are_read_as_torch_reads_them(bits: int) -> None:
    for kind, codes in (("e4m3", torch.arange(127)), ("e8m0", torch.arange(100, 150))):
        scale = codes.to(torch.uint8).view(KINDS[kind])[:, None]
        keys = Packed(
            pack_codes(torch.ones(len(codes), 16, dtype=torch.uint8), bits),
            scale,
            None,
            bits,
            (1, 16),
            levels=torch.arange(2.0**bits).half(),
        )
        rows = Rows(keys, replace(keys, codes=3 * keys.codes))
        q = torch.zeros(len(codes), 1, 16)
        starts, lengths = torch.arange(len(codes)), torch.ones(len(codes), dtype=torch.int64)
        for level in LEVELS:
            out, _ = cpu.decode(q, rows, Ranges(starts, lengths), Options(1.0), level=level)
            assert torch.equal(out[:, 0, 0], 3 * scale[:, 0].float())


@pytest.mark.parametrize(("change", "message"), [
    ({"levels": torch.ones(15).half()}, "levels must be"),
    ({"zero": torch.ones(440, 4).half(), "scale": torch.ones(440, 4).to(torch.float8_e4m3fn)}, "scale must be"),
    ({"row_scale": torch.ones(3)}, "row_scale must be"),
])  # fmt: skip
def test_operands_that_do_not_match_are_refused(change: dict[str, Any], message: str) -> None:
    s, rows = problem("float16")
    with pytest.raises(ValueError, match=message):
        decode(s.q, replace(rows, keys=replace(rows.keys, **change)), s.where, Options(1.0))


def test_factors_of_rows_of_values_are_refused() -> None:
    s, rows = problem("float16")
    scaled = replace(rows.values, row_scale=torch.ones(rows.count))
    with pytest.raises(ValueError, match=r"values\.row_scale must be None"):
        decode(s.q, replace(rows, values=scaled), s.where, Options(1.0))
