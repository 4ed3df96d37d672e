"""Decode on coupled codes in Triton against float32 attention over the decoded rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import reference as plain
from kvpress.kernels.coded import STEP, Coded, Rotary
from kvpress.kernels.packed import pack
from kvpress.kernels.triton.lookup import lookup_decode, lookup_select, reference
from tests.kernels.builders import Streams, streams
from tests.kernels_triton.interpreted.problems import LENGTHS, assert_close, lowest_precision


def coded(
    rows: int, dim: int, coupled: int, bits: int, entries: int = 0, books: int = 1, dtype: torch.dtype = torch.float32
) -> Coded:
    entries = entries or 2**bits
    codes = pack(torch.randint(0, entries, (rows, dim // coupled)), bits)
    return Coded(codes, torch.randn(books, dim // coupled, entries, coupled).to(dtype), bits)


def rotary(s: Streams, half: int, listed: bool = True) -> Rotary:
    """Scattered positions in five blocks, or runs that cross them."""
    tables = (10 * torch.rand(size, half) for size in (5, STEP))
    coarse, fine = (torch.stack([angle.cos(), angle.sin()], dim=1) for angle in tables)
    if not listed:
        return Rotary(coarse, fine, STEP - 5 - s.starts)
    return Rotary(coarse, fine, torch.randint(0, 9, s.starts.shape), torch.randint(0, 300, (s.rows,)).int())


def arguments(keys: Coded, values: Coded, turn: Rotary | None = None) -> dict[str, Any]:
    sides = {"key": keys, "value": values}
    named = {f"{name}_{field}": getattr(side, field) for name, side in sides.items() for field in vars(side)}
    return named | (vars(turn) if turn else {})


@pytest.mark.parametrize(
    ("dim", "value_dim", "coupled", "bits", "entries", "queries"),
    [
        (64, 64, 4, 8, 256, 4),
        (128, 80, 8, 8, 200, 16),
        (64, 96, 1, 1, 2, 1),
        (80, 64, 1, 2, 3, 2),
        (96, 64, 1, 3, 8, 3),
        (64, 128, 2, 4, 16, 1),
        (192, 64, 3, 9, 400, 4),
        (64, 64, 2, 10, 1024, 4),
        (256, 64, 4, 12, 4096, 1),
    ],
)
def test_matches_reference(dim: int, value_dim: int, coupled: int, bits: int, entries: int, queries: int) -> None:
    s = streams(LENGTHS, queries, dim)
    keys = coded(s.rows, dim, coupled, bits, entries, books=2)
    values = coded(s.rows, value_dim, 2, bits, books=2)
    book = torch.arange(len(LENGTHS)) % 2
    expected = reference(s.q, keys, values, plain.ranges(s.starts, s.lengths), book.tolist(), 0.1)
    ours = lookup_decode(
        s.q, **arguments(keys, values), starts=s.starts, lengths=s.lengths, scale=0.1, book_of_stream=book
    )
    assert_close(ours, expected, expected[0])


@pytest.mark.parametrize(
    ("dim", "coupled", "bits", "half", "dtype"),
    [
        (64, 4, 8, 32, torch.float16),
        (64, 1, 4, 32, torch.float32),
        (80, 2, 3, 20, torch.float32),
        (128, 8, 8, 16, torch.float16),
        (96, 3, 10, 20, torch.float32),
        (48, 8, 8, 12, torch.float32),
        (64, 4, 8, 0, torch.float16),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_keys_are_turned_as_they_are_read(
    dim: int, coupled: int, bits: int, half: int, dtype: torch.dtype, listed: bool
) -> None:
    s = streams(LENGTHS, 4, dim, dtype)
    keys, values = (coded(s.rows, dim, c, bits, dtype=dtype) for c in (coupled, 1 if bits < 8 else 2))
    turn = rotary(s, half, listed)
    rows, every = plain.ranges(s.starts, s.lengths), torch.arange(s.rows)
    unused = ~torch.isin(every, torch.cat(rows))
    for side in (keys, values):  # rows of no stream name no entry of any book
        side.codes[unused] = 255
    if turn.positions is not None:
        turn.positions[unused] = 2**31 - 1
    expected = reference(s.q, keys, values, rows, [0] * len(rows), 0.1, turn)
    book = torch.zeros(len(rows), dtype=torch.int64)
    ours = lookup_decode(
        s.q, **arguments(keys, values, turn), starts=s.starts, lengths=s.lengths, scale=0.1, book_of_stream=book
    )
    exact = keys.rows(0, every)
    for n, own in enumerate(rows):
        exact[own] = turn.turn(exact[own], turn.at(n, own))
    assert_close(ours, expected, lowest_precision(s.q, exact, values.rows(0, every), rows, 0.1, dtype))


@pytest.mark.parametrize("options", [{"causal": 3}, {"softcap": 4.0, "bias": True}])
def test_options(options: dict[str, Any]) -> None:
    s = streams([*LENGTHS, 2], 6, 64)
    keys, values = (coded(s.rows, 64, 4, 8, 32) for _ in range(2))
    if "bias" in options:
        options = {**options, "bias": torch.randn(s.rows)}
    expected = reference(s.q, keys, values, plain.ranges(s.starts, s.lengths), [0] * 6, 0.2, **options)
    book = torch.zeros(6, dtype=torch.int64)
    where: dict[str, Tensor] = {"starts": s.starts, "lengths": s.lengths, "book_of_stream": book}
    ours = lookup_decode(s.q, **arguments(keys, values), **where, scale=0.2, **options)
    assert_close(ours, expected, expected[0])


@pytest.mark.parametrize(("half", "listed"), [(0, True), (16, True), (16, False)])
def test_select(half: int, listed: bool) -> None:
    s = streams([100] * 4, 4, 64)
    keys, values = coded(s.rows, 64, 4, 8, books=4), coded(s.rows, 80, 1, 4, books=4)
    turn, bias = rotary(s, half, listed) if half else None, torch.randn(s.rows)
    counts = torch.tensor([0, 70, 1, 33])
    rows = torch.stack([start + torch.randperm(100)[:70] for start in s.starts]).int()
    rows[torch.arange(70) >= counts[:, None]] = 2**31 - 1
    expected = reference(s.q, keys, values, plain.listed(rows, counts), [0, 1, 2, 3], 0.2, turn, 5.0, bias)
    where: dict[str, Tensor] = {"rows": rows, "counts": counts, "book_of_stream": torch.arange(4)}
    ours = lookup_select(s.q, **arguments(keys, values, turn), **where, scale=0.2, softcap=5.0, bias=bias)
    assert_close(ours, expected, expected[0])


def test_a_code_past_the_book_names_its_last_entry() -> None:
    s = streams([40], 4, 64)
    keys, values = coded(s.rows, 64, 4, 8, 200), coded(s.rows, 64, 4, 8, 10)
    where: dict[str, Tensor] = {"starts": s.starts, "lengths": s.lengths, "book_of_stream": torch.tensor([0])}
    keys.codes[::3], values.codes[::2] = 250, 10
    past = lookup_decode(s.q, **arguments(keys, values), **where, scale=0.1)
    keys.codes[::3], values.codes[::2] = 199, 9
    assert torch.equal(lookup_decode(s.q, **arguments(keys, values), **where, scale=0.1)[0], past[0])


BAD: dict[str, dict[str, Any]] = {
    "q must be": {"q": torch.zeros(2, 8)},
    "key_book must be": {"key_book": torch.zeros(1, 4, 16)},
    "value_bits must be one of": {"value_bits": 5},
    "key_codes must be uint8": {"key_codes": torch.zeros(20, 4)},
    "coarse, fine and shift must be given together": {"positions": torch.zeros(20, dtype=torch.int32)},
    "starts must be": {"starts": torch.zeros(3, dtype=torch.int64)},
    "all tensors must be on cpu": {"key_book": torch.zeros(1, 4, 16, 2, device="meta")},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str) -> None:
    stream, side = torch.zeros(2, dtype=torch.int64), coded(20, 8, 2, 4)
    args = {"q": torch.zeros(2, 4, 8), "starts": stream, "lengths": stream, "book_of_stream": stream, "scale": 1.0}
    with pytest.raises(ValueError, match=message):
        lookup_decode(**(args | arguments(side, side) | BAD[message]))


def test_bad_selections_are_named() -> None:
    counts, side = torch.zeros(2, dtype=torch.int64), coded(20, 8, 2, 4)
    args = {"q": torch.zeros(2, 4, 8), "counts": counts, "book_of_stream": counts, "scale": 1.0}
    with pytest.raises(ValueError, match="rows must be int32/int64"):
        lookup_select(**(args | arguments(side, side)), rows=torch.zeros(2, 3))
