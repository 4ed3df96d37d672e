# SPDX-License-Identifier: Apache-2.0
"""Decode attention on quantised rows against float32 attention over their exact values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpress.kernels import Listed, Options, Packed, Ranges, Rows, counters, decode, reset_counters
from kvpress.kernels.attention import cpu, reference
from tests.kernels.builders import (
    assert_same_lse,
    dense,
    pack,
    quantise,
    quantise_centred,
    relative_error,
    streams,
)
from tests.kernels.compiler import LEVELS, needs_compiler

LENGTHS = [0, 1, 17, 63, 129, 300]
LIMIT = 1e-3


def outliers(rows: int, dim: int) -> torch.Tensor:
    keys = torch.randn(rows, dim)
    keys[:, ::16] *= 4
    return keys


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (80, 80), (96, 128), (128, 128), (192, 96), (256, 256)])
@pytest.mark.parametrize(("group", "tokens"), [(1, 1), (4, 3), (16, 1)])
def test_matches_attention_over_exact_values(bits: int, dim: int, value_dim: int, group: int, tokens: int) -> None:
    s = streams(LENGTHS, group * tokens, dim)
    width = 16 if value_dim == 80 else 32
    keys, exact_keys = quantise(outliers(s.rows, dim), bits, (32, 1))
    values, exact_values = quantise(torch.randn(s.rows, value_dim), bits, (1, width))
    out, lse = decode(s.q, Rows(keys, values), s.where, Options(dim**-0.5))
    expected, expected_lse = reference.decode(s.q, dense(exact_keys, exact_values), s.where, Options(dim**-0.5))
    assert relative_error(out, expected) < LIMIT
    assert_same_lse(lse, expected_lse, LIMIT)


def test_reference_reads_the_documented_layout() -> None:
    for bits in (1, 2, 3, 4, 8):
        for group in ((32, 1), (1, 8), (5, 4)):
            side, exact = quantise(torch.randn(70, 24), bits, group)
            assert torch.equal(side.read(torch.arange(70)), exact)


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    "groups", [((32, 1), (1, 32)), ((32, 1), (4, 1)), ((8, 64), (1, 32)), ((1, 4), (1, 1)), ((1, 64), (1, 96))]
)
def test_every_level_and_grouping_agrees(
    level: str, bits: int, groups: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    s = streams([0, 5, 1100], 6, 64)
    dtype = torch.float16 if bits % 2 else torch.float32
    keys, _ = quantise(outliers(s.rows, 64), bits, groups[0], dtype)
    values, _ = quantise(torch.randn(s.rows, 96), bits, groups[1])
    args = (s.q, Rows(keys, values, torch.randn(s.rows)), s.where, Options(0.125, softcap=4.0, causal=3))
    out, lse = cpu.decode(*args, level=level)
    expected, expected_lse = reference.decode(*args)
    assert relative_error(out, expected) < LIMIT
    assert_same_lse(lse, expected_lse, LIMIT)


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("dim", "value_dim"), [(16, 512), (32, 40), (40, 160), (96, 64), (192, 32), (512, 16)])
def test_every_level_reads_rows_of_every_width(level: str, bits: int, dim: int, value_dim: int) -> None:
    for queries in (1, 2, 7):
        s = streams([3, 300], queries, dim)
        keys, _ = quantise(outliers(s.rows, dim), bits, (32, 1))
        values, _ = quantise(torch.randn(s.rows, value_dim), bits, (1, value_dim))
        for where in (s.where, s.listed()):
            args = (s.q, Rows(keys, values), where, Options(dim**-0.5))
            out, lse = cpu.decode(*args, level=level)
            expected, expected_lse = reference.decode(*args)
            assert relative_error(out, expected) < LIMIT
            assert_same_lse(lse, expected_lse, LIMIT)


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("width", "scales"), [(None, torch.float16), (16, torch.float16), (None, torch.float32), (5, torch.float32)]
)
def test_a_zero_point_needs_no_zeros(level: str, bits: int, width: int | None, scales: torch.dtype) -> None:
    s = streams([0, 5, 1100], 6, 80)
    keys, _ = quantise_centred(outliers(s.rows, 80), bits, width, scales)
    values, _ = quantise_centred(torch.randn(s.rows, 160), bits, width and 2 * width, scales)
    for where, causal in ((s.where, 3), (s.listed(), 0)):
        args = (s.q, Rows(keys, values, torch.randn(s.rows)), where, Options(0.1, softcap=4.0, causal=causal))
        out, lse = cpu.decode(*args, level=level)
        expected, expected_lse = reference.decode(*args)
        assert relative_error(out, expected) < LIMIT
        assert_same_lse(lse, expected_lse, LIMIT)


def test_the_reference_reads_a_zero_point() -> None:
    for bits, width in ((1, None), (3, 8), (8, None)):
        side, exact = quantise_centred(torch.randn(70, 24), bits, width)
        assert torch.equal(side.read(torch.arange(70)), exact)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero_point": 16.0}, r"keys.zero_point must be a multiple of 0.5 in \[0, 15\], got 16.0"),
        ({"zero_point": -0.5}, r"keys.zero_point must be .* got -0.5"),
        ({"zero_point": 7.25}, r"keys.zero_point must be .* got 7.25"),
        ({"zero": torch.zeros(8, 1).half()}, "keys.zero_point must be 0 with zeros or levels, got 7.5"),
        ({"levels": torch.zeros(16).half()}, "keys.zero_point must be 0 with zeros or levels, got 7.5"),
    ],
)
def test_zero_points_that_are_no_codes_are_refused(change: dict[str, Any], message: str) -> None:
    side, _ = quantise_centred(torch.randn(8, 64), 4)
    nothing = torch.zeros(1, dtype=torch.int64)
    rows = Rows(replace(side, **change), side)
    with pytest.raises(ValueError, match=message):
        decode(torch.zeros(1, 1, 64), rows, Ranges(nothing, nothing), Options(0.1))


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("small", [0.1, 1e-3])
def test_an_attention_sink_of_small_values_does_not_blur_the_others(
    small: float, width: int, bits: int, level: str
) -> None:
    """The first key gets most of the attention and has a short value, as in language models."""
    s = streams([256, 700], 4, 64)
    s.q[..., 0] = 4
    keys, raw = torch.randn(s.rows, 64), torch.randn(s.rows, 64)
    keys[:, 0] = 0
    keys[s.starts, 0], raw[s.starts] = 18, small * raw[s.starts]  # a logit of 9
    (packed_keys, _), (values, _) = quantise(keys, 8, (32, 1)), quantise(raw, bits, (1, width))
    args = (s.q, Rows(packed_keys, values), s.where, Options(0.125))
    expected, _ = reference.decode(*args)
    out, _ = cpu.decode(*args, level=level)
    assert relative_error(out, expected) < LIMIT


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("key_group", [(32, 1), (3, 1), (1, 32), (8, 64), (1, 4)])
def test_float32_scales_are_read_as_exactly_as_float32_rows(level: str, bits: int, key_group: tuple[int, int]) -> None:
    s = streams([0, 5, 700], 6, 64)
    keys, exact_keys = quantise(outliers(s.rows, 64), bits, key_group, torch.float32)
    values, exact_values = quantise(torch.randn(s.rows, 96), bits, (1, 32), torch.float32)
    exact = dense(exact_keys, exact_values)
    for where in (s.where, s.listed()):
        out, lse = cpu.decode(s.q, Rows(keys, values), where, Options(0.125, causal=3), level=level)
        expected, expected_lse = reference.decode(s.q, exact, where, Options(0.125, causal=3))
        assert relative_error(out, expected) < 1e-5
        assert_same_lse(lse, expected_lse, 1e-5)


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [128, 512])
def test_no_sum_overflows_where_codes_and_queries_are_as_large_as_they_can_be(dim: int, bits: int, level: str) -> None:
    s = streams([96], 4, dim)
    s.q[:] = torch.tensor([1.0, -1.0, 0.5, 1.0])[:, None]
    codes = pack(torch.full((s.rows, dim), 2**bits - 1, dtype=torch.uint8), bits)
    keys, values = (
        Packed(codes, torch.full(shape, 0.01).half(), torch.zeros(shape).half(), bits, group)
        for shape, group in (((-(-s.rows // 32), dim), (32, 1)), ((s.rows, dim // 32), (1, 32)))
    )
    args = (s.q, Rows(keys, values), s.where, Options(0.1))
    (out, lse), (expected, expected_lse) = cpu.decode(*args, level=level), reference.decode(*args)
    assert relative_error(out, expected) < LIMIT
    assert relative_error(lse, expected_lse) < LIMIT


def test_mixed_bits_and_lengths_of_groups_after_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    s = streams([150, 300], 4, 128)
    original = outliers(1024, 128)
    keys, exact = quantise(original, 4, (32, 1))
    kept = torch.randperm(1024)[: s.rows].sort().values
    lengths = (kept // 32).bincount(minlength=32).int()
    keys = replace(keys, codes=keys.codes[kept].contiguous(), group_lengths=lengths)
    values, exact_values = quantise(torch.randn(s.rows, 128), 2, (1, 32))
    expected, _ = reference.decode(s.q, dense(exact[kept], exact_values), s.where, Options(0.1))
    out, _ = decode(s.q, Rows(keys, values), s.where, Options(0.1))
    assert relative_error(out, expected) < LIMIT
    short = replace(keys, group_lengths=lengths // 2)
    for kernels in ("1", "0"):
        monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
        with pytest.raises(ValueError, match=r"stream \d refers to"):
            decode(s.q, Rows(short, values), s.where, Options(0.1))


def test_groups_of_keys_and_values_have_lengths_of_their_own() -> None:
    s = streams([150, 300], 4, 64)
    sides, exact = [], []
    for group in ((32, 1), (16, 1)):
        side, values = quantise(torch.randn(1024, 64), 4, group)
        kept = torch.randperm(1024)[: s.rows].sort().values
        lengths = (kept // group[0]).bincount(minlength=len(side.scale)).int()
        sides.append(replace(side, codes=side.codes[kept].contiguous(), group_lengths=lengths))
        exact.append(values[kept])
    for where in (s.where, s.listed()):
        out, lse = decode(s.q, Rows(*sides), where, Options(0.1))
        expected, expected_lse = reference.decode(s.q, dense(*exact), where, Options(0.1))
        assert relative_error(out, expected) < LIMIT
        assert_same_lse(lse, expected_lse, LIMIT)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("page", [1, 16])
def test_select_matches_reference(bits: int, page: int) -> None:
    s = streams([512] * 3, 8, 128)
    keys, exact_keys = quantise(outliers(s.rows, 128), bits, (32, 1))
    values, exact_values = quantise(torch.randn(s.rows, 128), bits, (1, 32))
    first = torch.stack([torch.randperm(s.rows // page)[: 160 // page] for _ in range(3)]) * page
    rows = (first[:, :, None] + torch.arange(page)).flatten(1).int()
    # The first and last row are those of a contiguous range, the rows between are permuted.
    rows[0] = torch.cat([torch.arange(1), torch.randperm(158) + 1, torch.tensor([159])])
    counts = torch.tensor([160, 0, 33])
    where = Listed(rows, counts)
    out, lse = decode(s.q, Rows(keys, values), where, Options(0.1))
    expected, expected_lse = reference.decode(s.q, dense(exact_keys, exact_values), where, Options(0.1))
    assert relative_error(out, expected) < LIMIT
    assert_same_lse(lse, expected_lse, LIMIT)


def test_constant_groups_have_scale_zero() -> None:
    s = streams([64], 4, 64)
    keys, _ = quantise(torch.full((s.rows, 64), 0.5), 4, (32, 1))
    values, _ = quantise(torch.full((s.rows, 64), -2.0), 4, (1, 32))
    out, lse = decode(s.q, Rows(keys, values), s.where, Options(0.1))
    assert torch.allclose(out, torch.full_like(out, -2.0), atol=1e-5)
    assert lse.isfinite().all()


def test_unused_rows_do_not_matter_and_results_repeat() -> None:
    s = streams([40, 0, 1300], 4, 128)
    keys, exact_keys = quantise(outliers(s.rows, 128), 4, (1, 128))
    values, exact_values = quantise(torch.randn(s.rows, 128), 4, (1, 32))
    unused = s.unused()
    for tensor in (keys.scale, keys.zero, values.scale, values.zero):
        tensor[unused] = float("nan")
    results = []
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        results.append(decode(s.q, Rows(keys, values), s.where, Options(0.1)))
    expected, _ = reference.decode(s.q, dense(exact_keys, exact_values), s.where, Options(0.1))
    assert relative_error(results[0][0], expected) < LIMIT
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


@needs_compiler
def test_fast_path_is_counted_and_the_fallback_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    s = streams([40, 50], 2, 64)
    keys, _ = quantise(outliers(s.rows, 64), 4, (32, 1))
    values, _ = quantise(torch.randn(s.rows, 64), 4, (1, 32))
    reset_counters()
    fast, _ = decode(s.q, Rows(keys, values), s.where, Options(0.1))
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", "0")
    slow, _ = decode(s.q, Rows(keys, values), s.where, Options(0.1))
    assert counters() == {"packed_decode": 1}
    assert relative_error(fast, slow) < LIMIT


BAD: dict[str, dict[str, dict[str, Any]]] = {
    "keys.bits must be one of \\(1, 2, 3, 4, 8\\), got 5": {"keys": {"bits": 5}},
    "keys must have a multiple of 8 channels for 1 bits, got 20": {"q": torch.zeros(1, 2, 20), "keys": {"bits": 1}},
    "keys.group must be .* divisor of 16 channels\\), got \\(32, 3\\)": {"keys": {"group": (32, 3)}},
    "values.group must be .*, got \\(0, 16\\)": {"values": {"group": (0, 16)}},
    "keys.codes must be uint8 \\[40, 8\\]": {"keys": {"codes": torch.zeros(40, 9, dtype=torch.uint8)}},
    "values.codes must be uint8 \\[40, ": {"values": {"codes": torch.zeros(39, 8, dtype=torch.uint8)}},
    "keys.scale must be float16/float32 \\[2, 16\\], got float16 \\[1, 16\\]": {
        "keys": {"scale": torch.zeros(1, 16).half()}
    },
    "values.scale must be float16/float32": {"values": {"scale": torch.zeros(40, 1).bfloat16()}},
    "values.zero must be float16 \\[40, 1\\]": {"values": {"zero": torch.zeros(40, 1)}},
    "keys.scale must be contiguous": {
        "keys": {"scale": torch.zeros(16, 2).half().T, "zero": torch.zeros(16, 2).half().T}
    },
    "keys.group_lengths must be int32 \\[groups\\]": {"keys": {"group_lengths": torch.ones(2, dtype=torch.int64)}},
    "values.group_lengths must be None": {"values": {"group_lengths": torch.ones(40, dtype=torch.int32)}},
    "stream 0 ": {"where": {"lengths": torch.tensor([41])}},
    "causal must be": {"options": {"causal": 3}},
    "sinks must be float32 \\[1, 2\\]": {"options": {"sinks": torch.zeros(2)}},
    "softcap must be": {"options": {"softcap": -1.0}},
}


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    change = BAD[message]
    sides = {
        "keys": quantise(torch.randn(40, 16), 4, (32, 1))[0],
        "values": quantise(torch.randn(40, 16), 4, (1, 16))[0],
    }
    keys, values = (replace(side, **change.get(name, {})) for name, side in sides.items())
    where = replace(
        Ranges(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)), **change.get("where", {})
    )
    options = replace(Options(1.0), **change.get("options", {}))
    with pytest.raises(ValueError, match=message):
        decode(change.get("q", torch.zeros(1, 2, 16)), Rows(keys, values), where, options)
