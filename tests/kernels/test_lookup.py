"""Decode and gather attention on coupled codes against plain torch."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import counters, dense_decode, dense_select, lookup, lookup_decode, lookup_select, reset_counters
from kvpress.kernels import reference as plain
from kvpress.kernels.coded import STEP, Coded, Rotary, turn_halves
from kvpress.kernels.cpu import build, launch
from kvpress.kernels.packed import CODE_BITS, pack
from tests.kernels.builders import Streams, assert_same_lse, relative_error, streams
from tests.kernels.compiler import needs_compiler

LENGTHS = [0, 1, 17, 63, 129, 300]

LEVELS = build.supported_levels() if launch.level() else ()


def coded(
    rows: int,
    dim: int,
    coupled: int,
    bits: int,
    *,
    entries: int = 0,
    books: int = 3,
    dtype: torch.dtype = torch.float16,
) -> Coded:
    """Random codes of ``2 ** bits`` entries unless told otherwise."""
    entries = entries or 2**bits
    codes = torch.randint(0, entries, (rows, dim // coupled))
    return Coded(pack(codes, bits), torch.randn(books, dim // coupled, entries, coupled).to(dtype), bits)


def frequencies(turned: int) -> Tensor:
    return 100.0 ** -torch.linspace(0, 1, turned // 2, dtype=torch.float64)


def tables(turned: int, length: int, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Coarse and fine angles of the positions before `length`; cosines and sines as long as `factor`."""
    coarse, fine = (at[:, None] * frequencies(turned) for at in (torch.arange(0, length, STEP), torch.arange(STEP)))
    return tuple(torch.stack([f * x.cos(), f * x.sin()], 1).float() for x, f in ((coarse, factor), (fine, 1.0)))


def rotary(s: Streams, turned: int, length: int = 300, factor: float = 1.0) -> Rotary:
    """Rows at neighbouring positions first, across blocks, then at scattered ones; streams are shifted."""
    run = torch.arange(min(s.rows, length - 9))
    at = torch.cat([run, torch.randint(0, length - 9, (s.rows - len(run),))])
    return Rotary(*tables(turned, length, factor), torch.randint(0, 10, (len(s.lengths),)), at.int())


def books_of(s: Streams, keys: Coded) -> Tensor:
    return torch.arange(len(s.lengths)) % keys.book.shape[0]


def flat(keys: Coded, values: Coded) -> tuple[Tensor, ...]:
    return keys.codes, keys.book, values.codes, values.book


def named(keys: Coded, values: Coded, turn: Rotary | None = None) -> dict[str, Any]:
    """Keyword arguments of the public operators."""
    return {"key_bits": keys.bits, "value_bits": values.bits, **(vars(turn) if turn else {})}


def decode(s: Streams, keys: Coded, values: Coded, turn: Rotary | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    return lookup_decode(s.q, *flat(keys, values), s.starts, s.lengths, 0.3, **named(keys, values, turn), **options)


def expected(
    s: Streams, keys: Coded, values: Coded, turn: Rotary | None = None, rows: list[Tensor] | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    rows = plain.ranges(s.starts, s.lengths) if rows is None else rows
    books = options.pop("book_of_stream", books_of(s, keys)).tolist()
    return lookup.reference(s.q, keys, values, rows, books, 0.3, turn, **options)


def assert_close(ours: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    assert relative_error(ours[0], wanted[0]) < 1e-5
    assert_same_lse(ours[1], wanted[1], 1e-5)


@pytest.mark.parametrize(("coupled", "bits"), [(1, 4), (2, 8), (4, 8), (8, 8), (8, 10), (16, 8)])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (96, 32), (128, 128), (192, 128)])
@pytest.mark.parametrize(("group", "tokens"), [(1, 1), (4, 3), (5, 2)])
@pytest.mark.parametrize("rotated", [False, True])
def test_matches_reference(
    coupled: int, bits: int, dim: int, value_dim: int, group: int, tokens: int, rotated: bool
) -> None:
    s = streams(LENGTHS, group * tokens, dim)
    keys, values = coded(s.rows, dim, coupled, bits), coded(s.rows, value_dim, coupled, bits)
    turn = rotary(s, dim) if rotated else None
    assert_close(decode(s, keys, values, turn), expected(s, keys, values, turn))


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("coupled", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("bits", CODE_BITS)
def test_every_width_coupling_and_level(bits: int, coupled: int, level: str) -> None:
    s = streams(LENGTHS[:5], 5, 128)
    keys = coded(s.rows, 128, coupled, bits)
    values = coded(s.rows, 8 * coupled, coupled, bits, entries=2**bits - 1, dtype=torch.float32)
    ours = lookup._launch(s.q, keys, values, s.lengths, books_of(s, keys), 0.3, starts=s.starts, level_name=level)
    assert_close(ours, expected(s, keys, values))


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", CODE_BITS)
def test_streams_long_enough_for_tables(bits: int, level: str) -> None:
    s = streams([12000 if bits == 12 else 4000], 3, 16)
    coupled = 16 * gcd(bits, 8) // 8
    keys = coded(s.rows, 16, coupled, bits, entries=max(2, 2**bits - 1), books=1)
    values = coded(s.rows, 16, coupled, bits, books=1)
    ours = lookup._launch(s.q, keys, values, s.lengths, books_of(s, keys), 0.3, starts=s.starts, level_name=level)
    assert_close(ours, expected(s, keys, values))


def options(name: str, s: Streams) -> dict[str, Any]:
    return {
        "plain": {},
        "softcap": {"softcap": 2.0},
        "bias": {"bias": torch.randn(s.rows)},
        "causal": {"causal": 3},
        "partial rotary": {"turn": rotary(s, 24)},
        "scaled rotary": {"turn": rotary(s, 64, factor=1.3)},
        "books": {"book_of_stream": torch.tensor([2, 2, 0, 1, 1, 0, 2, 0])},
    }[name]


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["plain", "softcap", "bias", "causal", "partial rotary", "scaled rotary", "books"])
def test_every_level_and_option_agrees(level: str, dtype: torch.dtype, name: str) -> None:
    s = streams([*LENGTHS, 2, 2500], 6, 80)
    keys, values = coded(s.rows, 80, 8, 8, dtype=dtype), coded(s.rows, 96, 4, 9, dtype=dtype)
    given = options(name, s)
    turn = given.pop("turn", None)
    books = given.pop("book_of_stream", books_of(s, keys))
    ours = lookup._launch(
        s.q, keys, values, s.lengths, books, 0.3, starts=s.starts, rotary=turn, level_name=level, **given
    )
    assert_close(ours, expected(s, keys, values, turn, book_of_stream=books, **given))


@pytest.mark.parametrize("coupled", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(("dim", "turned"), [(64, 64), (64, 16), (80, 20), (96, 96), (128, 64), (256, 256)])
def test_rotated_keys_whole_partial_and_scaled(dim: int, turned: int, coupled: int) -> None:
    s = streams([70, 40, 1], 4, dim)
    keys = coded(s.rows, dim, coupled, 8, entries=16)
    turn = rotary(s, turned, length=130, factor=1.2)
    assert_close(decode(s, keys, keys, turn), expected(s, keys, keys, turn))


POSITIONS = [0, 63, 64, 65, 131071]


def test_two_tables_give_the_angles_of_every_position() -> None:
    at = torch.tensor(POSITIONS)
    exact = at[:, None] * frequencies(64)
    found = Rotary(*tables(64, 131072), shift=at).angles(at)
    for part, expected in zip(found, (exact.cos(), exact.sin()), strict=True):
        assert (part - expected).abs().max() < 1e-6


@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("gaps", [False, True])
def test_rotation_is_the_one_of_rotated_dense_keys(gaps: bool, dim: int) -> None:
    first = torch.tensor([*POSITIONS, 50, 1000])
    s = streams([1] * len(POSITIONS) + [200, 150], 4, dim)
    keys, values = coded(s.rows, dim, 4, 8, entries=32), coded(s.rows, 32, 4, 8)
    at, shift = torch.zeros(s.rows, dtype=torch.int64), first - s.starts
    for n, rows in enumerate(plain.ranges(s.starts, s.lengths)):
        steps = torch.randint(1, 100 if gaps else 2, (len(rows),))
        at[rows] = first[n] + steps.cumsum(0) - steps[0]
    turn = Rotary(*tables(dim, 131072), torch.zeros_like(first) if gaps else shift, at.int() if gaps else None)
    angle, every = at[:, None] * frequencies(dim), torch.arange(s.rows)
    dense = turn_halves(keys.rows(0, every).double(), angle.cos(), angle.sin()).float()
    out = decode(s, keys, values, turn, book_of_stream=torch.zeros(len(first), dtype=torch.int64))
    assert_close(out, dense_decode(s.q, dense, values.rows(0, every), s.starts, s.lengths, 0.3))


def test_rows_of_a_run_need_no_positions() -> None:
    s = streams([70, 1, 200], 6, 64)
    keys, values = coded(s.rows, 64, 8, 8), coded(s.rows, 64, 8, 8)
    run = Rotary(*tables(64, 300), torch.tensor([0, 299, 60]) - s.starts)
    listed = replace(run, positions=torch.arange(s.rows).int())
    rows = torch.stack([start + torch.arange(70) for start in s.starts])
    for found, wanted in zip(decode(s, keys, values, run), decode(s, keys, values, listed), strict=True):
        assert torch.equal(found, wanted)
    counts = s.lengths.clamp_max(70)
    for turn in (run, listed):
        picked = lookup_select(s.q, *flat(keys, values), rows, counts, 0.3, **named(keys, values, turn))
        assert_close(picked, expected(s, keys, values, run, plain.listed(rows, counts)))


@pytest.mark.parametrize(("rows", "bits"), [(200, 8), (1000, 10)])
def test_one_entry_per_distinct_row_is_exact_attention(rows: int, bits: int) -> None:
    s = streams([rows - 6], 4, 16)
    x, y = torch.randn(s.rows, 4, 4), torch.randn(s.rows, 4, 4)
    codes = pack(torch.arange(s.rows)[:, None].expand(-1, 4), bits)
    keys, values = (Coded(codes, side.transpose(0, 1)[None].contiguous(), bits) for side in (x, y))
    x, y = x.flatten(1), y.flatten(1)
    assert_close(decode(s, keys, values), dense_decode(s.q, x, y, s.starts, s.lengths, 0.3))
    listed, counts = torch.randint(0, s.rows, (1, 90)), torch.tensor([80])
    picked = lookup_select(s.q, *flat(keys, values), listed, counts, 0.3, **named(keys, values))
    assert_close(picked, dense_select(s.q, x, y, listed, counts, 0.3))


@pytest.mark.parametrize("bits", CODE_BITS)
def test_codes_past_the_end_of_the_book_name_its_last_entry(bits: int) -> None:
    s = streams([0, 1, 129, 2000], 3, 32)
    largest = torch.randint(2**bits - 2, 2**bits, (s.rows, 8))
    book = torch.randn(2, 8, 2**bits - 1, 4)
    beyond, clamped = (Coded(pack(codes, bits), book, bits) for codes in (largest, largest.clamp_max(2**bits - 2)))
    every = torch.arange(s.rows)
    assert torch.equal(beyond.rows(0, every), clamped.rows(0, every))
    assert_close(decode(s, beyond, beyond), decode(s, clamped, clamped))


def surrounded(x: Tensor, poison: float) -> Tensor:
    """The same tensor amid poison, with no room between."""
    buffer = torch.full((x.numel() + 256,), poison, dtype=x.dtype)
    inside = buffer[128 : 128 + x.numel()].view(x.shape)
    inside.copy_(x)
    return inside


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", CODE_BITS)
def test_nothing_outside_the_tensors_is_used_or_written(bits: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s = streams([1, 40, 900], 3, 24, gap=0)
    nan, coupled = float("nan"), 24 * gcd(bits, 8) // 8
    keys, values = (coded(s.rows, 24, coupled, bits, entries=2**bits - 1) for _ in range(2))
    turn = rotary(s, 22)
    bias = torch.randn(s.rows)
    rows = torch.cat([torch.randint(0, s.rows, (3, 100)), torch.full((3, 1), -1)], dim=1)
    counts = torch.tensor([100, 0, 63])
    wanted = expected(s, keys, values, turn, bias=bias)
    wanted_picked = expected(s, keys, values, rows=plain.listed(rows, counts), bias=bias)

    made: list[Tensor] = []

    def empty(*shape: int, dtype: torch.dtype) -> Tensor:
        made.append(surrounded(torch.full(shape, nan, dtype=dtype), 7.0))
        return made[-1]

    monkeypatch.setattr(torch, "empty", empty)
    keys, values = (Coded(surrounded(x.codes, 255), surrounded(x.book, nan), bits) for x in (keys, values))
    coarse, fine, shift, at = vars(turn).values()
    turn = Rotary(surrounded(coarse, nan), surrounded(fine, nan), surrounded(shift, -1), surrounded(at, -1))
    q, bias, books = surrounded(s.q, nan), surrounded(bias, nan), books_of(s, keys)
    common = {"bias": bias, "level_name": level}
    decoded = lookup._launch(q, keys, values, s.lengths, books, 0.3, starts=s.starts, rotary=turn, **common)
    picked = lookup._launch(q, keys, values, counts, books, 0.3, rows=surrounded(rows.int(), -1), **common)
    monkeypatch.undo()
    assert_close(decoded, wanted)
    assert_close(picked, wanted_picked)
    for tensor in made:
        around = torch.as_strided(tensor, (tensor.numel() + 256,), (1,), tensor.storage_offset() - 128)
        assert (around[:128] == 7).all()
        assert (around[-128:] == 7).all()


@pytest.mark.parametrize("bits", [1, 3, 4, 8, 10])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rotated", [False, True])
def test_select_reads_the_listed_rows_only(bits: int, dtype: torch.dtype, rotated: bool) -> None:
    s = streams([500, 2, 90], 5, 64)
    keys, values = coded(s.rows, 64, 8, bits), coded(s.rows, 32, 4, 8)
    rows = torch.randint(0, s.rows, (3, 1700))
    counts = torch.tensor([0, 63, 1650])
    past = torch.arange(1700) >= counts[:, None]
    turn, bias = rotary(s, 64) if rotated else None, torch.randn(s.rows)
    wanted = expected(s, keys, values, turn, plain.listed(rows, counts), softcap=3.0, bias=bias)
    arguments = (s.q, *flat(keys, values), rows.masked_fill(past, -5).to(dtype), counts, 0.3)
    ours = lookup_select(*arguments, **named(keys, values, turn), softcap=3.0, bias=bias)
    assert_close(ours, wanted)


@pytest.mark.parametrize("length", [1, 17, 63, 129, 1500])
@pytest.mark.parametrize("bits", [2, 8, 12])
def test_select_of_all_rows_is_decode(length: int, bits: int) -> None:
    s = streams([length, length], 4, 64)
    keys, values = coded(s.rows, 64, 2, bits), coded(s.rows, 64, 2, bits)
    rows = torch.stack([s.starts[n] + torch.randperm(length) for n in range(2)])
    picked = lookup_select(s.q, *flat(keys, values), rows, s.lengths, 0.3, **named(keys, values))
    assert_close(picked, decode(s, keys, values))


def test_a_sink_is_a_row_without_a_value() -> None:
    s = streams([40, 0], 3, 16, gap=1)
    keys, values = coded(s.rows, 16, 4, 8), coded(s.rows, 16, 4, 8)
    first = s.starts - 1  # a zero key and a zero value whose logit is its bias
    for side in (keys, values):
        side.codes[first] = 0
        side.book[:, :, 0] = 0
    bias = torch.zeros(s.rows)
    bias[first] = torch.tensor([1.5, -0.5])
    with_row = Streams(s.q, first, s.lengths + 1, s.rows)
    sinks = bias[first][:, None].expand(2, 3)
    assert_close(decode(s, keys, values, sinks=sinks), decode(with_row, keys, values, bias=bias))
    rows = s.starts[:, None] + torch.arange(40)
    picked = lookup_select(s.q, *flat(keys, values), rows, s.lengths, 0.3, sinks=sinks)
    assert_close(picked, decode(with_row, keys, values, bias=bias))


def test_growing_logits_and_long_streams() -> None:
    # Each chunk beats the last one by far, and the stream spans several pieces.
    s = streams([40000], 2, 32)
    keys, values = coded(s.rows, 32, 8, 8, books=1), coded(s.rows, 32, 8, 8, books=1)
    bias = (torch.arange(s.rows) - s.rows) * 0.015
    assert_close(decode(s, keys, values, bias=bias), expected(s, keys, values, bias=bias))
    turn = rotary(s, 32)
    assert_close(decode(s, keys, values, turn, bias=bias), expected(s, keys, values, turn, bias=bias))


def test_strided_codes_and_unused_rows_do_not_matter() -> None:
    s = streams([40, 0, 300], 4, 64)
    wide = torch.randint(0, 16, (s.rows, 40), dtype=torch.uint8)
    unused = torch.ones(s.rows, dtype=torch.bool)
    unused[torch.cat(plain.ranges(s.starts, s.lengths))] = False
    wide[unused] = 255
    book = torch.randn(1, 16, 16, 4)
    keys, values = Coded(wide[:, :16], book, 8), Coded(wide[:, 20:36], book, 8)
    assert_close(decode(s, keys, values), expected(s, keys, values))


@pytest.mark.parametrize("rotated", [False, True])
def test_result_does_not_depend_on_threads(rotated: bool) -> None:
    s = streams([20000, 1, 17000], 4, 32)
    keys, values = coded(s.rows, 32, 8, 8), coded(s.rows, 32, 8, 8)
    turn = rotary(s, 32) if rotated else None
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(decode(s, keys, values, turn))
    torch.set_num_threads(1)
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


@needs_compiler
def test_fast_path_is_counted_and_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    s = streams([40, 50], 2, 64)
    keys, values = coded(s.rows, 64, 8, 8), coded(s.rows, 64, 4, 12, entries=3000)
    rows = s.starts[:, None] + torch.arange(40)
    listed = (s.q, *flat(keys, values), rows, s.lengths.clamp_max(30), 0.3)
    reset_counters()
    fast, picked = decode(s, keys, values), lookup_select(*listed, **named(keys, values))
    assert counters() == {"lookup_decode": 1, "lookup_select": 1}
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", "0")
    assert_close(fast, decode(s, keys, values))
    assert_close(picked, lookup_select(*listed, **named(keys, values)))
    assert counters() == {"lookup_decode": 1, "lookup_select": 1}


def test_opcheck() -> None:
    s = streams([4, 0, 9], 3, 16)
    keys, values = coded(s.rows, 16, 2, 3), coded(s.rows, 24, 3, 9)
    sides = (keys.codes, keys.book, 3, values.codes, values.book, 9)
    turn, books, bias = rotary(s, 8), torch.arange(3), torch.randn(s.rows)
    rest = (books, 0.1, *vars(turn).values(), 5.0, bias)
    ops = torch.ops.kvpress
    torch.library.opcheck(ops.lookup_decode.default, (s.q, *sides, s.starts, s.lengths, *rest, 3))
    rows = s.starts[:, None] + torch.arange(4)
    torch.library.opcheck(ops.lookup_select.default, (s.q, *sides, rows, s.lengths.clamp_max(4), *rest))


BAD = {
    "key_codes must be uint8 \\[20, 2\\]": {"key_codes": torch.zeros(20, 3, dtype=torch.uint8)},
    "key_codes must be uint8 .*got int16": {"key_codes": torch.zeros(20, 2, dtype=torch.int16)},
    "value_codes must be uint8 \\[20, 2\\]": {"value_codes": torch.zeros(19, 2, dtype=torch.uint8)},
    "value_codes must be uint8 \\[20, 1\\]": {"value_bits": 4},
    "key_codes must be contiguous": {"key_codes": torch.zeros(2, 20, dtype=torch.uint8).T},
    "key_bits must be one of \\(1, 2, 3, 4, 8, 9, 10, 12\\), got 5": {"key_bits": 5},
    "value_book must hold a multiple of 4 groups for 10 bits, got 2": {"value_bits": 10},
    "key_book must be float16/float32": {"key_book": torch.zeros(2, 2, 16, 4, dtype=torch.bfloat16)},
    "key_book must be contiguous": {"key_book": torch.zeros(2, 2, 4, 16).transpose(2, 3)},
    "key_book must hold 8 channels": {"key_book": torch.zeros(2, 2, 16, 3)},
    "key_book must hold at least one channel": {"key_book": torch.zeros(2, 2, 16, 0)},
    "key_book must have 1 to 256 entries for 8 bits, got 257": {"key_book": torch.zeros(2, 2, 257, 4)},
    "value_book must have 1 to 16 entries for 4 bits, got 17": {
        "value_bits": 4,
        "value_book": torch.zeros(2, 2, 17, 4),
    },
    "value_book must hold 2 books like key_book, got 1": {"value_book": torch.zeros(1, 2, 16, 4)},
    "book_of_stream must be int64 \\[2\\]": {"book_of_stream": torch.zeros(3, dtype=torch.int64)},
    "stream 0 .*books": {"book_of_stream": torch.tensor([2, 0])},
    "coarse, fine and shift must be given together": {"shift": None},
    "positions only with them": {"coarse": None, "fine": None, "shift": None},
    "fine must be float32 \\[64, 2, rotary / 2\\]": {"fine": torch.zeros(63, 2, 2)},
    "fine must turn at most the 8 channels of q, got 10": {"fine": torch.zeros(64, 2, 5)},
    "coarse must be float32 \\[P / STEP, 2, 2\\]": {"coarse": torch.zeros(1, 2, 3)},
    "coarse must be contiguous": {"coarse": torch.zeros(2, 2, 2).transpose(1, 2)},
    "shift must be int64 \\[2\\]": {"shift": torch.zeros(3, dtype=torch.int64)},
    "positions must be int32 \\[20\\]": {"positions": torch.zeros(20)},
    "stream 1 .*positions": {"positions": torch.full((20,), 64, dtype=torch.int32)},
    "softcap must be positive or None, got 0.0": {"softcap": 0.0},
    "bias must be float32 \\[20\\]": {"bias": torch.zeros(19)},
    "sinks must be float32 \\[2, 4\\]": {"sinks": torch.zeros(2)},
}
BAD_STREAMS = {
    "stream 1 ": {"lengths": torch.tensor([1, 21])},
    "starts must be int64 \\[2\\]": {"starts": torch.zeros(3, dtype=torch.int64)},
    "causal must be 0 or divide the 4 query rows, got 3": {"causal": 3},
}
BAD_ROWS = {
    "counts\\[1\\]|stream 1 ": {"counts": torch.tensor([0, 6])},
    "rows\\[1\\]|stream 1 ": {"rows": torch.tensor([[0] * 5, [0, 20, 0, 0, 0]])},
    "rows must be int32/int64": {"rows": torch.zeros(2, 5)},
}


def arguments(changes: dict[str, Any]) -> dict[str, Any]:
    args: dict[str, Any] = {
        "q": torch.zeros(2, 4, 8),
        "key_codes": torch.zeros(20, 2, dtype=torch.uint8),
        "key_book": torch.zeros(2, 2, 16, 4),
        "value_codes": torch.zeros(20, 2, dtype=torch.uint8),
        "value_book": torch.zeros(2, 2, 16, 4),
        "scale": 1.0,
    }
    if changes.keys() & {"coarse", "fine", "shift", "positions"}:
        args |= {"coarse": torch.zeros(1, 2, 2), "fine": torch.zeros(64, 2, 2)}
        args |= {"shift": torch.zeros(2, dtype=torch.int64), "positions": torch.zeros(20, dtype=torch.int32)}
    return args


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("message", BAD | BAD_STREAMS)
def test_bad_arguments_are_named(message: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    changes = (BAD | BAD_STREAMS)[message]
    where = {"starts": torch.zeros(2, dtype=torch.int64), "lengths": torch.tensor([0, 2])}
    with pytest.raises(ValueError, match=message):
        lookup_decode(**(arguments(changes) | where | changes))


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("message", BAD | BAD_ROWS)
def test_bad_arguments_of_select_are_named(message: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    changes = (BAD | BAD_ROWS)[message]
    where = {"rows": torch.zeros(2, 5, dtype=torch.int64), "counts": torch.tensor([0, 2])}
    with pytest.raises(ValueError, match=message):
        lookup_select(**(arguments(changes) | where | changes))


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("shift", [-4, 60, 2**63 - 1, -(2**63)])
def test_positions_outside_the_tables_are_refused(
    shift: int, listed: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    args = arguments({"shift": None}) | {"shift": torch.tensor([0, shift])}
    args["positions"] = torch.arange(20, dtype=torch.int32) if listed else None
    run, rows = torch.tensor([0, 3]), torch.tensor([[0, 0], [4, 3]])
    lookup_decode(**args, starts=run, lengths=torch.tensor([20, 0]))
    with pytest.raises(ValueError, match=r"stream 1 .*positions"):
        lookup_decode(**args, starts=run, lengths=torch.tensor([20, 2]))
    lookup_select(**args, rows=rows, counts=torch.tensor([2, 0]))
    with pytest.raises(ValueError, match=r"stream 1 .*positions"):
        lookup_select(**args, rows=rows, counts=torch.tensor([2, 2]))
