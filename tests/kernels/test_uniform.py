"""Decode attention on quantised rows against float32 attention over their exact values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpress.kernels import counters, reset_counters, uniform_decode, uniform_select
from kvpress.kernels import dense as dense_kernels
from kvpress.kernels import reference as plain
from kvpress.kernels.cpu import build, launch
from kvpress.kernels.packed import Packed, dequantise
from kvpress.kernels.uniform import reference
from tests.kernels.builders import assert_same_lse, correction, flat, quantise, relative_error, streams
from tests.kernels.compiler import needs_compiler

LENGTHS = [0, 1, 17, 63, 129, 300]
LIMIT = 1e-3

LEVELS = build.supported_levels() if launch.level() else ()


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
    out, lse = uniform_decode(s.q, starts=s.starts, lengths=s.lengths, scale=dim**-0.5, **flat(keys, values))
    rows = plain.ranges(s.starts, s.lengths)
    expected, expected_lse = dense_kernels.reference(s.q, exact_keys, exact_values, rows, dim**-0.5)
    assert relative_error(out, expected) < LIMIT
    assert_same_lse(lse, expected_lse, LIMIT)


def test_reference_reads_the_documented_layout() -> None:
    for bits in (1, 2, 3, 4, 8):
        for group in ((32, 1), (1, 8), (5, 4)):
            side, exact = quantise(torch.randn(70, 24), bits, group)
            assert torch.equal(dequantise(side, torch.arange(70)), exact)


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("groups", [((32, 1), (1, 32)), ((32, 1), (4, 1)), ((8, 64), (1, 32)), ((1, 4), (1, 1))])
def test_every_level_and_grouping_agrees(
    level: str, bits: int, groups: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    s = streams([0, 5, 1100], 6, 64)
    dtype = torch.float16 if bits % 2 else torch.float32
    keys, _ = quantise(outliers(s.rows, 64), bits, groups[0], dtype)
    values, _ = quantise(torch.randn(s.rows, 96), bits, groups[1])
    kwargs: dict[str, Any] = {"softcap": 4.0, "bias": torch.randn(s.rows), "causal": 3}
    out, lse = launch.attend(s.q, keys, values, s.lengths, 0.125, starts=s.starts, level_name=level, **kwargs)
    rows = plain.ranges(s.starts, s.lengths)
    expected, expected_lse = reference(s.q, keys, values, rows, 0.125, **kwargs)
    assert relative_error(out, expected) < LIMIT
    assert_same_lse(lse, expected_lse, LIMIT)


def test_mixed_bits_and_row_groups_after_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    s = streams([150, 300], 4, 128)
    original = outliers(1024, 128)
    keys, exact = quantise(original, 4, (32, 1))
    kept = torch.randperm(1024)[: s.rows].sort().values
    keys = Packed(keys.codes[kept].contiguous(), keys.scale, keys.zero, 4, (32, 1))
    row_group = (kept // 32).int()
    values, exact_values = quantise(torch.randn(s.rows, 128), 2, (1, 32))
    rows = plain.ranges(s.starts, s.lengths)
    expected, _ = dense_kernels.reference(s.q, exact[kept], exact_values, rows, 0.1)
    out, _ = uniform_decode(
        s.q, starts=s.starts, lengths=s.lengths, scale=0.1, row_group=row_group, **flat(keys, values)
    )
    assert relative_error(out, expected) < LIMIT
    for kernels in ("1", "0"):
        monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
        with pytest.raises(ValueError, match="stream 0 refers to"):
            uniform_decode(
                s.q, starts=s.starts, lengths=s.lengths, scale=0.1, row_group=row_group + 32, **flat(keys, values)
            )


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("page", [1, 16])
def test_select_matches_reference(bits: int, page: int) -> None:
    s = streams([512] * 3, 8, 128)
    keys, exact_keys = quantise(outliers(s.rows, 128), bits, (32, 1))
    values, exact_values = quantise(torch.randn(s.rows, 128), bits, (1, 32))
    first = torch.stack([torch.randperm(s.rows // page)[: 160 // page] for _ in range(3)]) * page
    rows = (first[:, :, None] + torch.arange(page)).flatten(1).int()
    # Ends one row count after its beginning without being contiguous in between.
    rows[0] = torch.cat([torch.arange(1), torch.randperm(158) + 1, torch.tensor([159])])
    counts = torch.tensor([160, 0, 33])
    out, lse = uniform_select(s.q, rows=rows, counts=counts, scale=0.1, **flat(keys, values))
    listed = plain.listed(rows, counts)
    expected, expected_lse = dense_kernels.reference(s.q, exact_keys, exact_values, listed, 0.1)
    assert relative_error(out, expected) < LIMIT
    assert_same_lse(lse, expected_lse, LIMIT)


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize(("columns", "rotations"), [(True, False), (False, True), (True, True)])
def test_columns_and_rotations_are_undone(
    columns: bool, rotations: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    lengths, dims = [5, 0, 200], {"key": 64, "value": 96}
    s = streams(lengths, 4, 64, torch.bfloat16)
    sides, options, exact = {}, {}, {}
    for name, dim in dims.items():
        sides[name], decoded = quantise(torch.randn(s.rows, dim), 4, (1, 32))
        terms, total = correction(s.rows, dim, 2, 0.05)
        column, rotation = torch.rand(3, dim) + 0.5, torch.linalg.qr(torch.randn(dim, dim)).Q
        options[f"{name}_correction"] = terms
        exact[name] = decoded + total
        if columns:
            options[f"{name}_column"] = column
            for n, rows in enumerate(plain.ranges(s.starts, s.lengths)):
                exact[name][rows] *= column[n]
        if rotations:
            options[f"{name}_rotation"] = rotation
            exact[name] = exact[name] @ rotation.T
    rows = plain.ranges(s.starts, s.lengths)
    expected, expected_lse = dense_kernels.reference(s.q, exact["key"], exact["value"], rows, 0.1)
    listed = torch.stack([torch.cat([r, r.new_zeros(200 - len(r))]) for r in rows])
    args = {"scale": 0.1, **flat(sides["key"], sides["value"]), **options}
    for out, lse in (
        uniform_decode(s.q, starts=s.starts, lengths=s.lengths, **args),
        uniform_select(s.q, rows=listed, counts=s.lengths, **args),
    ):
        assert relative_error(out, expected) < LIMIT
        assert_same_lse(lse, expected_lse, LIMIT)


def test_constant_groups_have_scale_zero() -> None:
    s = streams([64], 4, 64)
    keys, _ = quantise(torch.full((s.rows, 64), 0.5), 4, (32, 1))
    values, _ = quantise(torch.full((s.rows, 64), -2.0), 4, (1, 32))
    out, lse = uniform_decode(s.q, starts=s.starts, lengths=s.lengths, scale=0.1, **flat(keys, values))
    assert torch.allclose(out, torch.full_like(out, -2.0), atol=1e-5)
    assert lse.isfinite().all()


def test_unused_rows_do_not_matter_and_results_repeat() -> None:
    s = streams([40, 0, 1300], 4, 128)
    keys, exact_keys = quantise(outliers(s.rows, 128), 4, (1, 128))
    values, exact_values = quantise(torch.randn(s.rows, 128), 4, (1, 32))
    unused = torch.ones(s.rows, dtype=torch.bool)
    unused[torch.cat(plain.ranges(s.starts, s.lengths))] = False
    for tensor in (keys.scale, keys.zero, values.scale, values.zero):
        tensor[unused] = float("nan")
    results = []
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        results.append(uniform_decode(s.q, starts=s.starts, lengths=s.lengths, scale=0.1, **flat(keys, values)))
    rows = plain.ranges(s.starts, s.lengths)
    expected, _ = dense_kernels.reference(s.q, exact_keys, exact_values, rows, 0.1)
    assert relative_error(results[0][0], expected) < LIMIT
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


@needs_compiler
def test_fast_path_is_counted_and_the_fallback_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    s = streams([40, 50], 2, 64)
    keys, _ = quantise(outliers(s.rows, 64), 4, (32, 1))
    values, _ = quantise(torch.randn(s.rows, 64), 4, (1, 32))
    reset_counters()
    fast, _ = uniform_decode(s.q, starts=s.starts, lengths=s.lengths, scale=0.1, **flat(keys, values))
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", "0")
    slow, _ = uniform_decode(s.q, starts=s.starts, lengths=s.lengths, scale=0.1, **flat(keys, values))
    assert counters() == {"uniform_decode": 1}
    assert relative_error(fast, slow) < LIMIT


def test_opcheck() -> None:
    s = streams([4, 0, 9], 3, 16)
    keys, _ = quantise(torch.randn(s.rows, 16), 4, (32, 1))
    values, _ = quantise(torch.randn(s.rows, 32), 2, (1, 32))
    sides = [x for side in (keys, values) for x in (side.codes, side.scale, side.zero, side.bits, list(side.group))]
    terms = [correction(s.rows, 16, 2, 0)[0].tensors(), correction(s.rows, 32, 1, 0.1)[0].tensors()]
    torch.library.opcheck(
        torch.ops.kvpress.uniform_decode.default,
        (s.q, *sides, s.starts, s.lengths, 0.1, None, 3, torch.randn(s.rows), None, *terms),
    )
    rows, counts = torch.zeros(3, 2, dtype=torch.int32), torch.tensor([0, 1, 2])
    torch.library.opcheck(
        torch.ops.kvpress.uniform_select.default, (s.q, *sides, rows, counts, 0.1, 5.0, None, None, [], [])
    )


BAD = {
    "key_bits must be one of \\(1, 2, 3, 4, 8\\), got 5": {"key_bits": 5},
    "key channels must be a multiple of 8 for 1 bits, got 20": {"q": torch.zeros(1, 2, 20), "key_bits": 1},
    "key_group must be .* divisor of 16 channels\\), got \\(32, 3\\)": {"key_group": (32, 3)},
    "value_group must be .*, got \\(0, 16\\)": {"value_group": (0, 16)},
    "key_codes must be uint8 \\[40, 8\\]": {"key_codes": torch.zeros(40, 9, dtype=torch.uint8)},
    "value_codes must be uint8 \\[40, ": {"value_codes": torch.zeros(39, 8, dtype=torch.uint8)},
    "key_scale must be float16/float32 \\[2, 16\\], got float16 \\[1, 16\\]": {"key_scale": torch.zeros(1, 16).half()},
    "value_scale must be float16/float32": {"value_scale": torch.zeros(40, 1).bfloat16()},
    "value_zero must be float16 \\[40, 1\\]": {"value_zero": torch.zeros(40, 1)},
    "key_scale must be contiguous": {"key_scale": torch.zeros(16, 2).half().T, "key_zero": torch.zeros(16, 2).half().T},
    "row_group must be int32 \\[40\\]": {"row_group": torch.zeros(40, dtype=torch.int64)},
    "stream 0 ": {"lengths": torch.tensor([41])},
    "causal must be": {"causal": 3},
    "key_column must be float32 \\[1, 16\\]": {"key_column": torch.zeros(16)},
    "value_column must be float32 \\[1, 16\\]": {"value_column": torch.zeros(1, 16).half()},
    "key_rotation must be float32 \\[16, 16\\]": {"key_rotation": torch.zeros(16, 8)},
    "value_rotation must be float32 \\[16, 16\\]": {"value_rotation": torch.zeros(8, 8)},
    "sinks must be float32 \\[1, 2\\]": {"sinks": torch.zeros(2)},
    "softcap must be": {"softcap": -1.0},
}


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    keys, _ = quantise(torch.randn(40, 16), 4, (32, 1))
    values, _ = quantise(torch.randn(40, 16), 4, (1, 16))
    start, length = torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
    args = {"q": torch.zeros(1, 2, 16), "starts": start, "lengths": length, "scale": 1.0, **flat(keys, values)}
    with pytest.raises(ValueError, match=message):
        uniform_decode(**(args | BAD[message]))
