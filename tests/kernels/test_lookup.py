"""Decode attention on coupled codes against plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import counters, dense_decode, lookup, lookup_decode, reset_counters
from kvpress.kernels import reference as plain
from kvpress.kernels.cpu import build, launch
from tests.kernels.builders import Streams, assert_same_lse, relative_error, streams

LENGTHS = [0, 1, 17, 63, 129, 300]

needs_compiler = pytest.mark.skipif(launch.level() is None, reason="no C++ compiler")
LEVELS = build.supported_levels() if launch.level() else ()


@dataclass
class Coded:
    """Codes [R, dim / coupled] with the books [books, dim / coupled, 2 ** bits, coupled] of one side."""

    codes: Tensor
    book: Tensor

    @classmethod
    def random(
        cls, rows: int, dim: int, coupled: int, bits: int, books: int = 3, dtype: torch.dtype = torch.float16
    ) -> Coded:
        codes = torch.randint(0, 2**bits, (rows, dim // coupled)).to(torch.uint8 if bits <= 8 else torch.int16)
        return cls(codes, torch.randn(books, dim // coupled, 2**bits, coupled).to(dtype))


def angles(positions: int, rotary: int) -> dict[str, Tensor]:
    frequency = 100.0 ** -torch.linspace(0, 1, rotary // 2)
    angle = torch.arange(positions)[:, None] * frequency
    return {"cos": angle.cos(), "sin": angle.sin()}


def both(
    s: Streams, keys: Coded, values: Coded, level: str | None = None, **options: Any
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The operator (or one level of its kernel) and the reference on the same problem."""
    books = options.pop("book_of_stream", torch.arange(len(s.lengths)) % keys.book.shape[0])
    sides = (keys.codes, keys.book, values.codes, values.book)
    if level is None:
        ours = lookup_decode(s.q, *sides, s.starts, s.lengths, 0.3, book_of_stream=books, **options)
    else:
        ours = lookup._launch(s.q, *sides, s.starts, s.lengths, books, 0.3, level_name=level, **options)
    turn = [options.pop(name, None) for name in ("positions", "cos", "sin")]
    rotary = None if turn[0] is None else lookup.Rotary(*turn)
    rows = plain.ranges(s.starts, s.lengths)
    return ours, lookup.reference(s.q, *sides, rows, books.tolist(), 0.3, rotary, **options)


def assert_close(ours: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert relative_error(ours[0], expected[0]) < 1e-5
    assert_same_lse(ours[1], expected[1], 1e-5)


@pytest.mark.parametrize(("coupled", "bits"), [(1, 4), (2, 8), (4, 8), (8, 8), (8, 10), (16, 5)])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (80, 48), (128, 128), (192, 128)])
@pytest.mark.parametrize(("group", "tokens"), [(1, 1), (4, 1), (4, 3), (5, 2)])
@pytest.mark.parametrize("rotated", [False, True])
def test_matches_reference(
    coupled: int, bits: int, dim: int, value_dim: int, group: int, tokens: int, rotated: bool
) -> None:
    s = streams(LENGTHS, group * tokens, dim)
    keys, values = Coded.random(s.rows, dim, coupled, bits), Coded.random(s.rows, value_dim, coupled, bits)
    options = {"positions": torch.randint(0, 50, (s.rows,), dtype=torch.int32), **angles(50, dim)} if rotated else {}
    assert_close(*both(s, keys, values, **options))


def options(name: str, rows: int) -> dict[str, Any]:
    return {
        "plain": {},
        "softcap": {"softcap": 2.0},
        "bias": {"bias": torch.randn(rows)},
        "causal": {"causal": 3},
        "partial rotary": {"positions": torch.randint(0, 9, (rows,), dtype=torch.int32), **angles(9, 24)},
        "books": {"book_of_stream": torch.tensor([2, 2, 0, 1, 1, 0, 2, 0])},
    }[name]


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["plain", "softcap", "bias", "causal", "partial rotary", "books"])
def test_every_level_and_option_agrees(level: str, dtype: torch.dtype, name: str) -> None:
    s = streams([*LENGTHS, 2, 2500], 6, 80)
    keys, values = Coded.random(s.rows, 80, 8, 8, dtype=dtype), Coded.random(s.rows, 96, 4, 9, dtype=dtype)
    assert_close(*both(s, keys, values, level, **options(name, s.rows)))


def test_one_entry_per_distinct_row_is_exact_attention() -> None:
    s = streams([200], 4, 16)
    x, y = torch.randn(s.rows, 16), torch.randn(s.rows, 16)
    codes = torch.arange(s.rows, dtype=torch.uint8)[:, None]
    sides = (codes, x[None, None], codes, y[None, None])
    ours = lookup_decode(s.q, *sides, s.starts, s.lengths, 0.3)
    assert_close(ours, dense_decode(s.q, x, y, s.starts, s.lengths, 0.3))


def test_growing_logits_and_long_streams() -> None:
    # Each chunk beats the last one by far, and the stream spans several pieces.
    s = streams([40000], 2, 32)
    keys, values = Coded.random(s.rows, 32, 8, 8, books=1), Coded.random(s.rows, 32, 8, 8, books=1)
    assert_close(*both(s, keys, values, bias=(torch.arange(s.rows) - s.rows) * 0.015))


def test_strided_codes_and_unused_rows_do_not_matter() -> None:
    s = streams([40, 0, 300], 4, 64)
    wide = torch.randint(0, 16, (s.rows, 40), dtype=torch.uint8)
    unused = torch.ones(s.rows, dtype=torch.bool)
    unused[torch.cat(plain.ranges(s.starts, s.lengths))] = False
    wide[unused] = 255
    book = torch.randn(1, 16, 16, 4)
    assert_close(*both(s, Coded(wide[:, :16], book), Coded(wide[:, 20:36], book)))


def test_result_does_not_depend_on_threads() -> None:
    s = streams([20000, 1, 17000], 4, 32)
    keys, values = Coded.random(s.rows, 32, 8, 8), Coded.random(s.rows, 32, 8, 8)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(lookup_decode(s.q, keys.codes, keys.book, values.codes, values.book, s.starts, s.lengths, 0.3))
    torch.set_num_threads(1)
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


@needs_compiler
def test_fast_path_is_counted_and_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    s = streams([40, 50], 2, 64)
    keys, values = Coded.random(s.rows, 64, 8, 8), Coded.random(s.rows, 64, 8, 8)
    args = (s.q, keys.codes, keys.book, values.codes, values.book, s.starts, s.lengths, 0.1)
    reset_counters()
    fast = lookup_decode(*args)
    assert counters() == {"lookup_decode": 1}
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", "0")
    assert_close(fast, lookup_decode(*args))
    assert counters() == {"lookup_decode": 1}


def test_opcheck() -> None:
    s = streams([4, 0, 9], 3, 16)
    keys, values = Coded.random(s.rows, 16, 4, 3), Coded.random(s.rows, 24, 8, 9)
    sides = (keys.codes, keys.book, values.codes, values.book)
    turn = angles(5, 8)
    args = (s.q, *sides, s.starts, s.lengths, torch.arange(3), 0.1)
    positions = torch.zeros(s.rows, dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.kvpress.lookup_decode.default,
        (*args, positions, turn["cos"], turn["sin"], 5.0, torch.randn(s.rows), 3),
    )


BAD = {
    "key_codes must be uint8/int16 \\[20, 2\\]": {"key_codes": torch.zeros(20, 3, dtype=torch.uint8)},
    "value_codes must be uint8/int16 \\[20, 2\\]": {"value_codes": torch.zeros(19, 2, dtype=torch.uint8)},
    "key_codes must be contiguous": {"key_codes": torch.zeros(2, 20, dtype=torch.uint8).T},
    "key_book must be float16/float32": {"key_book": torch.zeros(2, 2, 16, 4, dtype=torch.bfloat16)},
    "key_book must be contiguous": {"key_book": torch.zeros(2, 2, 4, 16).transpose(2, 3)},
    "key_book must hold 8 channels": {"key_book": torch.zeros(2, 2, 16, 3)},
    "key_book must have 1 to 256 entries for its codes, got 257": {"key_book": torch.zeros(2, 2, 257, 4)},
    "value_book must hold 2 books like key_book, got 1": {"value_book": torch.zeros(1, 2, 16, 4)},
    "book_of_stream must be int64 \\[2\\]": {"book_of_stream": torch.zeros(3, dtype=torch.int64)},
    "stream 0 .*books": {"book_of_stream": torch.tensor([2, 0])},
    "stream 1 ": {"lengths": torch.tensor([1, 21])},
    "positions, cos and sin must be given together": {"cos": torch.zeros(4, 2)},
    "cos must turn at most the 8 channels of q, got 10": {"cos": torch.zeros(4, 5), "sin": torch.zeros(4, 5)},
    "stream 1 .*positions": {"positions": torch.full((20,), 4, dtype=torch.int32), "lengths": torch.tensor([0, 2])},
    "softcap must be positive or None, got 0.0": {"softcap": 0.0},
    "causal must be 0 or divide the 4 query rows, got 3": {"causal": 3},
    "bias must be float32 \\[20\\]": {"bias": torch.zeros(19)},
}


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    args: dict[str, Any] = {
        "q": torch.zeros(2, 4, 8),
        "key_codes": torch.zeros(20, 2, dtype=torch.uint8),
        "key_book": torch.zeros(2, 2, 16, 4),
        "value_codes": torch.zeros(20, 2, dtype=torch.uint8),
        "value_book": torch.zeros(2, 2, 16, 4),
        "starts": torch.zeros(2, dtype=torch.int64),
        "lengths": torch.zeros(2, dtype=torch.int64),
        "scale": 1.0,
    }
    if "positions" in BAD[message] or "sin" in BAD[message]:
        args |= {"positions": torch.zeros(20, dtype=torch.int32), "cos": torch.zeros(4, 2), "sin": torch.zeros(4, 2)}
    with pytest.raises(ValueError, match=message):
        lookup_decode(**(args | BAD[message]))
