"""Decode on coupled codes in Triton against float32 attention over the decoded rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import reference as plain
from kvpress.kernels.triton.lookup import lookup_decode, reference
from tests.kernels.builders import streams
from tests.kernels_triton.interpreted.problems import LENGTHS, assert_close


def coded(rows: int, books: int, dim: int, coupled: int, entries: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    kind = torch.uint8 if entries <= 256 else torch.int16
    codes = torch.randint(0, entries, (rows, dim // coupled)).to(kind)
    return codes, torch.randn(books, dim // coupled, entries, coupled).to(dtype)


@pytest.mark.parametrize(
    ("dim", "value_dim", "coupled", "entries", "queries", "dtype"),
    [
        (64, 64, 4, 256, 4, torch.float32),
        (128, 128, 8, 256, 4, torch.float16),
        (96, 80, 2, 16, 3, torch.float32),
        (64, 96, 1, 8, 1, torch.float32),
        (96, 96, 3, 1000, 4, torch.float32),
    ],
)
def test_matches_reference(
    dim: int, value_dim: int, coupled: int, entries: int, queries: int, dtype: torch.dtype
) -> None:
    s = streams(LENGTHS, queries, dim, torch.float16 if dtype == torch.float16 else torch.float32)
    keys, values = coded(s.rows, 2, dim, coupled, entries, dtype), coded(s.rows, 2, value_dim, 2, 64, dtype)
    book = torch.arange(len(LENGTHS)) % 2
    rows = plain.ranges(s.starts, s.lengths)
    expected = reference(s.q, *keys, *values, rows, book.tolist(), 0.1)
    rounded = expected[0] if dtype == torch.float32 else expected[0] * (1 + 5e-4)
    assert_close(lookup_decode(s.q, *keys, *values, s.starts, s.lengths, book, 0.1), expected, rounded)


@pytest.mark.parametrize("options", [{"causal": 3}, {"softcap": 4.0, "bias": True}])
def test_options(options: dict[str, Any]) -> None:
    s = streams([*LENGTHS, 2], 6, 64)
    keys, values = (coded(s.rows, 1, 64, 4, 32, torch.float32) for _ in range(2))
    if "bias" in options:
        options = {**options, "bias": torch.randn(s.rows)}
    book = torch.zeros(6, dtype=torch.int64)
    expected = reference(s.q, *keys, *values, plain.ranges(s.starts, s.lengths), [0] * 6, 0.2, **options)
    ours = lookup_decode(s.q, *keys, *values, s.starts, s.lengths, book, 0.2, **options)
    assert_close(ours, expected, expected[0])


BAD = {
    "q must be": {"q": torch.zeros(2, 8)},
    "key_book must be": {"key_book": torch.zeros(1, 4, 16)},
    "key_codes must be uint8/int16": {"key_codes": torch.zeros(20, 4)},
    "value_codes must be uint8/int16 \\[20, 4\\]": {"value_codes": torch.zeros(19, 4, dtype=torch.uint8)},
    "value_codes must be contiguous": {"value_codes": torch.zeros(4, 20, dtype=torch.uint8).T},
    "key_book must be contiguous": {"key_book": torch.zeros(1, 4, 2, 16).mT},
    "key_book must hold 8 channels": {"key_book": torch.zeros(1, 4, 16, 4)},
    "value_book must hold 1 books": {"value_book": torch.zeros(2, 4, 16, 2)},
    "book_of_stream must be": {"book_of_stream": torch.zeros(3, dtype=torch.int64)},
    "starts must be": {"starts": torch.zeros(3, dtype=torch.int64)},
    "lengths must be": {"lengths": torch.zeros(2)},
    "softcap must be": {"softcap": 0.0},
    "causal must be": {"causal": 3},
    "bias must be": {"bias": torch.zeros(19)},
    "all tensors must be on cpu": {"key_book": torch.zeros(1, 4, 16, 2, device="meta")},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str) -> None:
    stream, codes, book = (
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(20, 4, dtype=torch.uint8),
        torch.zeros(1, 4, 16, 2),
    )
    args: dict[str, Any] = {"q": torch.zeros(2, 4, 8), "starts": stream, "lengths": stream, "book_of_stream": stream}
    args |= {"key_codes": codes, "key_book": book, "value_codes": codes, "value_book": book, "scale": 1.0}
    with pytest.raises(ValueError, match=message):
        lookup_decode(**(args | BAD[message]))
