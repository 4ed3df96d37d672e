# SPDX-License-Identifier: Apache-2.0
"""Rows of the pages with the largest bounds in one call, against bounds, choice and list in three calls."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from kvpress.kernels import (
    Listed,
    Pages,
    Ranges,
    counters,
    page_bounds,
    page_rows,
    reset_counters,
    rows_of_blocks,
    top_rows,
)
from kvpress.kernels.scores import cpu as scores_cpu
from kvpress.kernels.selection import cpu
from tests.kernels.builders import streams
from tests.kernels.compiler import LEVELS, needs_compiler

LENGTHS = [0, 1, 3, 4, 5, 63, 64, 65, 300, 1001]
SIZE, CHANNELS = 4, 24


def problem(lengths: list[int], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return pages of streams with gaps between them, and the rows of the streams, which lie elsewhere."""
    pages = streams([-(-length // SIZE) for length in lengths], 3, CHANNELS, dtype)
    low = torch.randn(pages.rows, CHANNELS).to(dtype)
    high = low + torch.rand(pages.rows, CHANNELS).to(dtype)
    counts = torch.tensor(lengths)
    pairs = Ranges(counts.cumsum(0) - counts + 7, counts)
    return {"q": pages.q, "low": low, "high": high, "where": pages.where, "pairs": pairs, "size": SIZE}


def operand(args: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `page_rows` with the fields of `Pages` among them in one operand."""
    names = [field.name for field in fields(Pages)]
    pages = {name: args[name] for name in names if name in args}
    rest = {name: value for name, value in args.items() if name not in names}
    longest = int(pages["pairs"].lengths.max())
    capacity = int(pages["where"].lengths.max())
    return {"pages": Pages(**({"longest": longest, "capacity": capacity} | pages)), **rest}


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_level_lists_the_rows_of_the_best_pages(level: str, dtype: torch.dtype) -> None:
    p = problem(LENGTHS, dtype)
    capacity, longest = -(-max(LENGTHS) // SIZE), max(LENGTHS)
    pages = operand(p)["pages"]
    bounds = scores_cpu.score(p["q"], *pages.bounds, p["where"], "max", capacity, level)
    by_stream = torch.tensor([min(5 + n, 12) for n in range(len(LENGTHS))])
    for k, first, last, limits in ((12, 0, 0, None), (12, 2, 3, None), (12, 2, 3, by_stream), (900, 0, 0, None)):
        rows, counts = cpu.choose_by_bounds(p["q"], pages, k, first, last, limits, level)
        chosen = Listed(*cpu.choose(bounds, p["where"], k, first, last, limits, level))
        expected = rows_of_blocks(chosen, p["where"], p["pairs"], SIZE, longest=longest)
        assert torch.equal(rows, expected[0])
        assert torch.equal(counts, expected[1])


@needs_compiler
def test_bounds_are_stored_where_there_are_more_threads_than_streams() -> None:
    p, listed, threads = problem([700, 900]), [], torch.get_num_threads()
    three = {"page_bounds": 1, "top_rows": 1}
    for count, names in ((1, {"page_rows": 1}), (2, {"page_rows": 1}), (3, three)):
        reset_counters()
        torch.set_num_threads(count)
        try:
            listed.append(page_rows(**operand(p), k=50, first=4, last=2))
        finally:
            torch.set_num_threads(threads)
        assert counters() == names
    assert all(map(torch.equal, listed[0], listed[1]))
    assert all(map(torch.equal, listed[0], listed[2]))


@needs_compiler
def test_without_kernels_the_same_rows_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem([700, 900, 0])
    fast = page_rows(**operand(p | {"longest": 1000}), k=50)
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", "0")
    plain = page_rows(**operand(p | {"longest": 1000}), k=50)
    assert all(map(torch.equal, fast, plain))
    bounds = page_bounds(p["q"], p["low"], p["high"], p["where"])
    rows, counts = top_rows(bounds, p["where"], 50)
    assert torch.equal(plain[1], rows_of_blocks(Listed(rows, counts), p["where"], p["pairs"], SIZE, longest=1000)[1])


BAD: dict[str, dict[str, Any]] = {
    "k must be at least 1, got 0": {"k": 0},
    "at most 4 together, got 3 and 2": {"first": 3, "last": 2},
    "limits must be int64 \\[2\\]": {"limits": torch.tensor([3])},
    "stream 1 .* choose from first \\+ last to k": {"first": 3, "limits": torch.tensor([4, 2])},
    "stream 1 .* the 5 stored rows": {"where": Ranges(torch.tensor([0, 2]), torch.tensor([3, 4]))},
    "streams must have at most 2 entries, their capacity, got 3": {"capacity": 2},
    "size must be at least 1 .* got 0": {"size": 0},
    "pairs.lengths must be int64": {"pairs": Ranges(torch.zeros(2, dtype=torch.int64), torch.zeros(2))},
    "low must be": {"low": torch.zeros(5, 3)},
}


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    args: dict[str, Any] = {
        "q": torch.zeros(2, 3, CHANNELS),
        "low": torch.zeros(5, CHANNELS),
        "high": torch.zeros(5, CHANNELS),
        "where": Ranges(torch.tensor([0, 2]), torch.tensor([3, 3])),
        "pairs": Ranges(torch.tensor([0, 12]), torch.tensor([12, 10])),
        "size": SIZE,
        "k": 4,
        "longest": 12,
    }
    with pytest.raises(ValueError, match=message):
        page_rows(**operand(args | BAD[message]))
