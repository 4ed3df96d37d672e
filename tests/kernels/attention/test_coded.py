# SPDX-License-Identifier: Apache-2.0
"""Decode and gather attention on coupled codes against plain torch."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import (
    CODE_BITS,
    Coded,
    Listed,
    Options,
    Ranges,
    Rotary,
    Rows,
    counters,
    decode,
    pack,
    reset_counters,
    rotate_halves,
)
from kvpress.kernels.attention import cpu, reference
from tests.kernels import emulated
from tests.kernels.builders import (
    angle_tables,
    assert_same_lse,
    coded,
    correction,
    dense,
    frequencies,
    relative_error,
    rotary,
    streams,
)
from tests.kernels.compiler import LEVELS, needs_compiler
from tests.pairwise import every_pair

LENGTHS = [0, 1, 17, 63, 129, 300]
EXACT = ("baseline", emulated.LEVEL)
"""Levels without a kernel for integer codebook levels."""


def rotated(keys: Coded, values: Coded, rotary: Rotary | None, log_weight: Tensor | None = None) -> Rows:
    return Rows(replace(keys, rotary=rotary), values, log_weight)


def assert_close(ours: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], limit: float = 1e-5) -> None:
    assert relative_error(ours[0], expected[0]) < limit
    assert_same_lse(ours[1], expected[1], limit)


@every_pair(
    codes=[(1, 4), (2, 8), (4, 8), (8, 8), (8, 10), (16, 8)],
    dims=[(64, 64), (96, 32), (128, 128), (192, 128)],
    queries=[(1, 1), (4, 3), (5, 2)],
    turned=[False, True],
)
def test_matches_reference(
    codes: tuple[int, int], dims: tuple[int, int], queries: tuple[int, int], turned: bool
) -> None:
    (coupled, bits), (dim, value_dim), (group, tokens) = codes, dims, queries
    s = streams(LENGTHS, group * tokens, dim)
    keys, values = coded(s.rows, dim, coupled, bits), coded(s.rows, value_dim, coupled, bits)
    args = (s.q, rotated(keys, values, rotary(s, dim) if turned else None), s.where, Options(0.3))
    assert_close(decode(*args), reference.decode(*args))


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("turned", [0, 32, 64])
@pytest.mark.parametrize("longest", [40, 3000])
def test_outliers_are_added_and_rotated_with_their_keys(longest: int, turned: int, level: str) -> None:
    s = streams([*LENGTHS[:4], longest], 5, 64)
    keys, values = coded(s.rows, 64, 1, 4), coded(s.rows, 96, 1, 4, shared=True)
    rotation = rotary(s, turned) if turned else None
    (terms, exact), (value_terms, value_exact) = correction(s.rows, 64, 0, 0.1), correction(s.rows, 96, 0, 0.05)
    scale = torch.rand(s.rows) + 0.5
    keys, values = replace(keys, correction=terms), replace(values, correction=value_terms, row_scale=scale)
    for where in (s.where, s.listed()):
        result = cpu.decode(s.q, rotated(keys, values, rotation), where, Options(0.3), level=level)
        assert_close(result, reference.decode(s.q, rotated(keys, values, rotation), s.where, Options(0.3)))
    plain, row = replace(keys, correction=None), torch.arange(s.rows)
    torch.testing.assert_close(keys.read(row), plain.read(row) + exact)
    torch.testing.assert_close(values.read(row), replace(values, correction=None).read(row) + value_exact)


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("coupled", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("bits", CODE_BITS)
def test_every_width_coupling_and_level(bits: int, coupled: int, level: str) -> None:
    s = streams(LENGTHS[:5], 5, 128)
    keys = coded(s.rows, 128, coupled, bits)
    values = coded(s.rows, 8 * coupled, coupled, bits, entries=2**bits - 1, dtype=torch.float32)
    args = (s.q, Rows(keys, values), s.where, Options(0.3))
    assert_close(cpu.decode(*args, level=level), reference.decode(*args))


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", CODE_BITS)
def test_streams_long_enough_for_tables(bits: int, level: str) -> None:
    s = streams([12000 if bits == 12 else 4000], 3, 16)
    coupled = 16 * gcd(bits, 8) // 8
    keys = coded(s.rows, 16, coupled, bits, entries=max(2, 2**bits - 1), books=1)
    values = coded(s.rows, 16, coupled, bits, books=1)
    args = (s.q, Rows(keys, values), s.where, Options(0.3))
    assert_close(cpu.decode(*args, level=level), reference.decode(*args))


def problem(name: str, dtype: torch.dtype) -> tuple[Tensor, Rows, Ranges, Options]:
    """Return a problem with one option."""
    s = streams([*LENGTHS, 2, 2500], 6, 80, dtype)
    keys, values = coded(s.rows, 80, 8, 8, dtype=dtype), coded(s.rows, 96, 4, 9, dtype=dtype)
    if name == "row scales":
        keys, values = (replace(side, row_scale=0.2 + torch.rand(s.rows)) for side in (keys, values))
    if name == "16-bit row scales":
        keys = replace(keys, row_scale=(0.2 + torch.rand(s.rows)).half())
        values = replace(values, row_scale=(0.2 + torch.rand(s.rows)).bfloat16())
    if name == "shared books":
        keys, values = (coded(s.rows, dim, c, 4, dtype=dtype, shared=True) for dim, c in ((80, 1), (96, 4)))
    if "rotary" in name:
        keys = replace(keys, rotary=rotary(s, 24 if "partial" in name else 64, factor=1.3 if "scaled" in name else 1.0))
    rows = Rows(keys, values, torch.randn(s.rows) if name == "log_weight" else None)
    where = s.where
    if "stream" in name:
        where = replace(where, stream=torch.tensor([2, 2, 0, 1, 1, 0, 2, 0]))
    options = {"softcap": {"softcap": 2.0}, "causal": {"causal": 3}, "row scales": {"softcap": 2.0}}.get(name, {})
    return s.q, rows, where, Options(0.3, **options)


OPTIONS = [
    "plain",
    "softcap",
    "log_weight",
    "causal",
    "partial rotary",
    "scaled rotary",
    "stream",
    "rotary of a stream",
    "row scales",
    "16-bit row scales",
    "shared books",
]


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_level_and_option_agrees(level: str, dtype: torch.dtype, name: str) -> None:
    args = problem(name, dtype)
    # For queries of 16 bits, the levels of one codebook are multiplied as integers.
    limit = 1e-3 if name == "shared books" and dtype == torch.float16 and level not in EXACT else 1e-5
    assert_close(cpu.decode(*args, level=level), reference.decode(*args), limit)


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("coupled", [1, 2])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize(("dim", "queries"), [(32, 1), (64, 5), (128, 4)])
def test_scalar_books_are_read_as_exactly_as_the_model_computes(
    dim: int, queries: int, bits: int, coupled: int, level: str
) -> None:
    s = streams([300, 40, 1, 1500], queries, dim)
    sides = [coded(s.rows, dim, coupled, bits, shared=True, entries=2**bits - (bits == 3)) for _ in range(2)]
    rows = Rows(*(replace(side, row_scale=0.2 + torch.rand(s.rows)) for side in sides))
    for where in (s.where, s.listed()):
        for q, limit in ((s.q, 1e-5), (s.q.half(), 1e-3)):
            args = (q, rows, where, Options(dim**-0.5))
            assert_close(cpu.decode(*args, level=level), reference.decode(*args), limit)


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("length", [40, 5000])
def test_a_shared_book_is_one_book_for_every_group(bits: int, length: int) -> None:
    """Short streams are batched, long ones use tables."""
    s = streams([length], 3, 16)
    coupled = gcd(bits, 8) * 2 // 8 or 1
    sides = [coded(s.rows, 16, coupled, bits, books=2, shared=True) for _ in range(2)]
    separate_sides = [replace(x, book=x.book.expand(-1, 16 // coupled, -1, -1).contiguous()) for x in sides]
    shared, separate = (decode(s.q, Rows(*rows), s.where, Options(0.3)) for rows in (sides, separate_sides))
    assert all(map(torch.equal, shared, separate))


BOOKS: list[dict[str, Any]] = [{"entries": 16}, {}, {"dtype": torch.float32}, {"shared": True}, {"bits": 10}]
"""Codebooks: only some centroids used, all used, float32, one codebook of all groups, and codes of two bytes."""


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("coupled", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    ("dim", "turned"), [(32, 32), (64, 64), (64, 32), (64, 16), (80, 20), (96, 96), (128, 64), (256, 256)]
)
def test_rotated_keys_whole_partial_and_scaled(dim: int, turned: int, coupled: int, level: str) -> None:
    s = streams([70, 40, 1], 4, dim)
    turn = rotary(s, turned, length=130, factor=1.2)
    for book in BOOKS if dim // coupled % 4 == 0 else BOOKS[:-1]:  # the two bits above a byte also fill bytes
        keys = coded(s.rows, dim, coupled, **{"bits": 8, **book})
        for where in (s.where, s.listed()):
            args = (s.q, rotated(keys, keys, turn), where, Options(0.3))
            assert_close(cpu.decode(*args, level=level), reference.decode(*args))


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_scalar_keys_are_rotated_where_they_stand(bits: int, level: str) -> None:
    s = streams([200, 33, 1], 5, 64)
    keys, values = coded(s.rows, 64, 1, bits), coded(s.rows, 32, 1, bits, shared=True)
    turn = rotary(s, 48, length=1000)
    steps = torch.randint(1, 4, (s.rows,)).cumsum(0).int()
    for angles in (turn, replace(turn, positions=steps, shift=torch.zeros_like(turn.shift))):
        args = (s.q, rotated(keys, values, angles), s.where, Options(0.3))
        assert_close(cpu.decode(*args, level=level), reference.decode(*args))


POSITIONS = [0, 63, 64, 65, 131071]


def test_two_tables_give_the_angles_of_every_position() -> None:
    at = torch.tensor(POSITIONS)
    exact = at[:, None] * frequencies(64)
    angles = Rotary(*angle_tables(64, 131072), shift=at).angles(at)
    for part, expected in zip(angles, (exact.cos(), exact.sin()), strict=True):
        assert (part - expected).abs().max() < 1e-6


@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("gaps", [False, True])
def test_rotation_is_the_one_of_rotated_dense_keys(gaps: bool, dim: int) -> None:
    first = torch.tensor([*POSITIONS, 50, 1000])
    s = streams([1] * len(POSITIONS) + [200, 150], 4, dim)
    keys, values = coded(s.rows, dim, 4, 8, entries=32, books=1), coded(s.rows, 32, 4, 8, books=1)
    at, shift = torch.zeros(s.rows, dtype=torch.int64), first - s.starts
    for n, rows in enumerate(s.where.numbers()):
        steps = torch.randint(1, 100 if gaps else 2, (len(rows),))
        at[rows] = first[n] + steps.cumsum(0) - steps[0]
    turn = Rotary(*angle_tables(dim, 131072), torch.zeros_like(first) if gaps else shift, at.int() if gaps else None)
    angle, every = at[:, None] * frequencies(dim), torch.arange(s.rows)
    exact = rotate_halves(keys.read(every).double(), angle.cos(), angle.sin()).float()
    out = decode(s.q, rotated(keys, values, turn), s.where, Options(0.3))
    assert_close(out, decode(s.q, dense(exact, values.read(every)), s.where, Options(0.3)))


def test_rows_of_a_run_need_no_positions() -> None:
    s = streams([70, 1, 200], 6, 64)
    keys, values = coded(s.rows, 64, 8, 8), coded(s.rows, 64, 8, 8)
    run = Rotary(*angle_tables(64, 300), torch.tensor([0, 299, 60]) - s.starts)
    listed = replace(run, positions=torch.arange(s.rows).int())
    some = Listed(torch.stack([start + torch.arange(70) for start in s.starts]), s.lengths.clamp_max(70))
    plainly, numbered = (decode(s.q, rotated(keys, values, r), s.where, Options(0.3)) for r in (run, listed))
    assert all(map(torch.equal, plainly, numbered))
    expected = reference.decode(s.q, rotated(keys, values, run), some, Options(0.3))
    for r in (run, listed):
        assert_close(decode(s.q, rotated(keys, values, r), some, Options(0.3)), expected)


@pytest.mark.parametrize(("rows", "bits"), [(200, 8), (1000, 10)])
def test_one_entry_per_distinct_row_is_exact_attention(rows: int, bits: int) -> None:
    s = streams([rows - 6], 4, 16)
    x, y = torch.randn(s.rows, 4, 4), torch.randn(s.rows, 4, 4)
    codes = pack(torch.arange(s.rows)[:, None].expand(-1, 4), bits)
    keys, values = (Coded(codes, side.transpose(0, 1)[None].contiguous(), bits) for side in (x, y))
    x, y = x.flatten(1), y.flatten(1)
    for where in (s.where, Listed(torch.randint(0, s.rows, (1, 90)), torch.tensor([80]))):
        expected = decode(s.q, dense(x, y), where, Options(0.3))
        assert_close(decode(s.q, Rows(keys, values), where, Options(0.3)), expected)


@pytest.mark.parametrize("bits", CODE_BITS)
def test_codes_past_the_end_of_the_book_name_its_last_entry(bits: int) -> None:
    s = streams([0, 1, 129, 2000], 3, 32)
    largest = torch.randint(2**bits - 2, 2**bits, (s.rows, 8))
    book = torch.randn(2, 8, 2**bits - 1, 4)
    beyond, clamped = (Coded(pack(codes, bits), book, bits) for codes in (largest, largest.clamp_max(2**bits - 2)))
    every = torch.arange(s.rows)
    assert torch.equal(beyond.read(every), clamped.read(every))
    ours, expected = (decode(s.q, Rows(side, side), s.where, Options(0.3)) for side in (beyond, clamped))
    assert_close(ours, expected)


def surrounded(x: Tensor, poison: float) -> Tensor:
    """Return the same tensor surrounded by poison, without a gap."""
    buffer = torch.full((x.numel() + 256,), poison, dtype=x.dtype)
    inside = buffer[128 : 128 + x.numel()].view(x.shape)
    inside.copy_(x)
    return inside


COUPLED = [(bits, 24, 24 * gcd(bits, 8) // 8, 22) for bits in CODE_BITS]
WHOLE = [(8, 64, coupled, turned) for coupled in (4, 8, 16) for turned in (32, 64)]
"""All centroids are used, and vectors of keys are centroids or whole parts of them."""
SCALAR = [(bits, 32, 1, 16) for bits in (1, 2, 3, 4)]


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("bits", "dim", "coupled", "turned"), COUPLED + SCALAR + WHOLE)
def test_nothing_outside_the_tensors_is_used_or_written(
    bits: int, dim: int, coupled: int, turned: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = streams([1, 40, 900], 3, dim, gap=0)
    nan = float("nan")
    entries = 2**bits - ((bits, dim, coupled, turned) not in WHOLE)
    keys, values = (coded(s.rows, dim, coupled, bits, entries=entries) for _ in range(2))
    keys, values = (replace(side, row_scale=torch.rand(s.rows)) for side in (keys, values))
    keys = replace(keys, rotary=rotary(s, turned))
    log_weight = torch.randn(s.rows)
    rows = torch.cat([torch.randint(0, s.rows, (3, 100)), torch.full((3, 1), -1)], dim=1)
    counts = torch.tensor([100, 0, 63])
    plainly = replace(keys, rotary=None)
    expected = reference.decode(s.q, Rows(keys, values, log_weight), s.where, Options(0.3))
    wanted_picked = reference.decode(s.q, Rows(plainly, values, log_weight), Listed(rows, counts), Options(0.3))

    outputs: list[Tensor] = []

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        outputs.append(surrounded(torch.full(shape, nan, dtype=dtype), 7.0))
        return outputs[-1]

    monkeypatch.setattr(torch, "empty", empty)
    coarse, fine, shift, at = vars(keys.rotary).values()
    turn = Rotary(surrounded(coarse, nan), surrounded(fine, nan), surrounded(shift, -1), surrounded(at, -1))
    keys, values = (
        Coded(surrounded(x.codes, 255), surrounded(x.book, nan), bits, surrounded(x.row_scale, nan))
        for x in (keys, values)
    )
    q, log_weight = surrounded(s.q, nan), surrounded(log_weight, nan)
    decoded = cpu.decode(q, rotated(keys, values, turn, log_weight), s.where, Options(0.3), level)
    some = Listed(surrounded(rows.int(), -1), counts)
    picked = cpu.decode(q, Rows(keys, values, log_weight), some, Options(0.3), level)
    monkeypatch.undo()
    assert_close(decoded, expected)
    assert_close(picked, wanted_picked)
    for tensor in outputs:
        fence = torch.as_strided(tensor, (tensor.numel() + 256,), (1,), tensor.storage_offset() - 128)
        assert (fence[:128] == 7).all()
        assert (fence[-128:] == 7).all()


@pytest.mark.parametrize("bits", [1, 3, 4, 8, 10])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("turned", [False, True])
def test_listed_rows_are_read_only(bits: int, dtype: torch.dtype, turned: bool) -> None:
    s = streams([500, 2, 90], 5, 64)
    keys, values = coded(s.rows, 64, 8, bits), coded(s.rows, 32, 4, 8)
    rows = torch.randint(0, s.rows, (3, 1700))
    counts = torch.tensor([0, 63, 1650])
    past = torch.arange(1700) >= counts[:, None]
    stored = rotated(keys, values, rotary(s, 64) if turned else None, torch.randn(s.rows))
    stored = replace(stored, values=replace(values, row_scale=torch.rand(s.rows)))
    options = Options(0.3, softcap=3.0)
    expected = reference.decode(s.q, stored, Listed(rows, counts), options)
    assert_close(decode(s.q, stored, Listed(rows.masked_fill(past, -5).to(dtype), counts), options), expected)


@pytest.mark.parametrize("length", [1, 17, 63, 129, 1500])
@pytest.mark.parametrize("bits", [2, 8, 12])
def test_select_of_all_rows_is_decode(length: int, bits: int) -> None:
    s = streams([length, length], 4, 64)
    keys, values = coded(s.rows, 64, 2, bits), coded(s.rows, 64, 2, bits)
    rows = torch.stack([s.starts[n] + torch.randperm(length) for n in range(2)])
    picked = decode(s.q, Rows(keys, values), Listed(rows, s.lengths), Options(0.3))
    assert_close(picked, decode(s.q, Rows(keys, values), s.where, Options(0.3)))


def test_a_sink_is_a_row_without_a_value() -> None:
    s = streams([40, 0], 3, 16, gap=1)
    keys, values = coded(s.rows, 16, 4, 8), coded(s.rows, 16, 4, 8)
    first = s.starts - 1  # a zero key and a zero value whose logit is its bias
    for side in (keys, values):
        side.codes[first] = 0
        side.book[:, :, 0] = 0
    log_weight = torch.zeros(s.rows)
    log_weight[first] = torch.tensor([1.5, -0.5])
    with_row = Ranges(first, s.lengths + 1)
    sinks = log_weight[first][:, None].expand(2, 3)
    expected = decode(s.q, Rows(keys, values, log_weight), with_row, Options(0.3))
    for where in (s.where, Listed(s.starts[:, None] + torch.arange(40), s.lengths)):
        assert_close(decode(s.q, Rows(keys, values), where, Options(0.3, sinks=sinks)), expected)


def test_growing_logits_and_long_streams() -> None:
    # The logits of each chunk exceed those of the previous chunk by far, and the stream spans several pieces.
    s = streams([40000], 2, 32)
    keys, values = coded(s.rows, 32, 8, 8, books=1), coded(s.rows, 32, 8, 8, books=1)
    log_weight = (torch.arange(s.rows) - s.rows) * 0.015
    for turn in (None, rotary(s, 32)):
        args = (s.q, rotated(keys, values, turn, log_weight), s.where, Options(0.3))
        assert_close(decode(*args), reference.decode(*args))


def test_strided_codes_and_unused_rows_do_not_matter() -> None:
    s = streams([40, 0, 300], 4, 64)
    wide = torch.randint(0, 16, (s.rows, 40), dtype=torch.uint8)
    wide[s.unused()] = 255
    book = torch.randn(1, 16, 16, 4)
    args = (s.q, Rows(Coded(wide[:, :16], book, 8), Coded(wide[:, 20:36], book, 8)), s.where, Options(0.3))
    assert_close(decode(*args), reference.decode(*args))


@pytest.mark.parametrize("turned", [False, True])
def test_result_does_not_depend_on_threads(turned: bool) -> None:
    s = streams([20000, 1, 17000], 4, 32)
    rows = rotated(coded(s.rows, 32, 8, 8), coded(s.rows, 32, 8, 8), rotary(s, 32) if turned else None)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(decode(s.q, rows, s.where, Options(0.3)))
    torch.set_num_threads(1)
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


@needs_compiler
def test_fast_path_is_counted_and_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    s = streams([40, 50], 2, 64)
    rows = Rows(coded(s.rows, 64, 8, 8), coded(s.rows, 64, 4, 12, entries=3000))
    some = Listed(s.starts[:, None] + torch.arange(40), s.lengths.clamp_max(30))
    reset_counters()
    fast, picked = (decode(s.q, rows, where, Options(0.3)) for where in (s.where, some))
    assert counters() == {"coded_decode": 1, "coded_select": 1}
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", "0")
    assert_close(fast, decode(s.q, rows, s.where, Options(0.3)))
    assert_close(picked, decode(s.q, rows, some, Options(0.3)))
    assert counters() == {"coded_decode": 1, "coded_select": 1}
