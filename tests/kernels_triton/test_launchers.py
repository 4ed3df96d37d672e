# SPDX-License-Identifier: Apache-2.0
"""Operators on a GPU read shapes only and no values of tensors, so that a step can be captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from kvpress import kernels
from kvpress.kernels import STEP, Basis, Coded, Correction, Dense, Listed, Options, Packed, Ranges, Rotary, Rows, Where
from kvpress.kernels.cpu import launch
from kvpress.kernels.triton import device

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.jit import KernelInterface

from kvpress.kernels.attention.triton import as_partials, merge_partials
from kvpress.kernels.attention.triton import coded as coded_kernel
from kvpress.kernels.attention.triton import dense as dense_kernel
from kvpress.kernels.attention.triton import packed as packed_kernel
from kvpress.kernels.attention.triton.merge import CHANNELS
from kvpress.kernels.quantisation import triton as quantisation
from kvpress.kernels.triton.grid import WITHOUT_DEVICE, resident

R, N, M, D = 4096, 8, 4, 64


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Record the grids of all launches; tensors made meanwhile have no values, and reading one raises."""
    launched: list[tuple[Any, ...]] = []

    def launch_kernel(kernel: object, grid: tuple[Any, ...]) -> Callable[..., None]:
        return lambda *args, **options: launched.append(grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", launch_kernel)
    monkeypatch.setattr(device, "available", lambda storage: True)
    monkeypatch.setattr(launch, "available", lambda storage: False)
    with FakeTensorMode():
        yield launched


def queries() -> Tensor:
    return torch.empty(N, M, D, dtype=torch.bfloat16)


def data() -> Tensor:
    return torch.empty(R, D, dtype=torch.bfloat16)


def ranges() -> Ranges:
    return Ranges(torch.empty(N, dtype=torch.int64), torch.empty(N, dtype=torch.int64))


def listed() -> Listed:
    return Listed(torch.empty(N, 100, dtype=torch.int32), torch.empty(N, dtype=torch.int64))


def packed(group: tuple[int, int]) -> Packed:
    scale = torch.empty(R // group[0], D // group[1], dtype=torch.float16)
    return Packed(torch.empty(R, D // 2, dtype=torch.uint8), scale, scale, 4, group)


def correction() -> Correction:
    factor, basis = torch.empty(R, 2, dtype=torch.float16), torch.empty(9, 2, D, dtype=torch.float16)
    first, channel = torch.empty(R + 1, dtype=torch.int32), torch.empty(99, dtype=torch.uint8)
    return Correction(factor, basis, torch.empty(R, dtype=torch.int32), first, channel, torch.empty(99).half())


def bases() -> dict[str, Basis]:
    return {name: Basis(torch.empty(N, D), torch.empty(D, D)) for name in ("key_basis", "value_basis")}


def dense() -> Rows:
    return Rows(Dense(data()), Dense(data()), torch.empty(R))


def corrected() -> Rows:
    keys, values = (replace(packed(group), correction=correction()) for group in ((32, 1), (1, 32)))
    return Rows(
        replace(keys, group_lengths=torch.empty(len(keys.scale), dtype=torch.int32)), values, torch.empty(R), **bases()
    )


def coded() -> Rows:
    shift, positions = torch.empty(N, dtype=torch.int64), torch.empty(R, dtype=torch.int32)
    angles = Rotary(torch.empty(9, 2, D // 2), torch.empty(STEP, 2, D // 2), shift, positions)
    codes, book = torch.empty(R, D // 4, dtype=torch.uint8), torch.empty(2, D // 4, 256, 4)
    side = Coded(codes, book, 8, torch.empty(R))
    return Rows(replace(side, rotary=angles), side, torch.empty(R), **bases())


def flat() -> Rows:
    """Return rows of codes in one codebook, without options."""
    side = Coded(torch.empty(R, D // 4, dtype=torch.uint8), torch.empty(1, D // 4, 256, 4), 8)
    return Rows(side, side)


def attend(rows: Rows, where: Where) -> None:
    kernels.decode(queries(), rows, where, Options(0.1, softcap=3.0, sinks=torch.empty(N, M)))


OPERATORS: dict[str, Callable[[], Any]] = {
    "dense": lambda: attend(dense(), ranges()),
    "dense, listed": lambda: attend(dense(), listed()),
    "packed": lambda: attend(corrected(), ranges()),
    "packed, listed": lambda: attend(corrected(), listed()),
    "coded": lambda: attend(coded(), ranges()),
    "coded, listed": lambda: attend(coded(), listed()),
    "column_mass": lambda: kernels.column_mass(
        queries(), dense(), ranges(), Options(0.1, sinks=torch.empty(N, M)), query_weight=torch.empty(N, M)
    ),
    "page_bounds": lambda: kernels.page_bounds(queries(), data(), data(), ranges(), capacity=100),
    "label_scores": lambda: kernels.label_scores(queries(), packed((1, D)), ranges(), capacity=100),
    "merge": lambda: merge_partials(queries(), as_partials([(torch.empty(N, M, D), torch.empty(N, M))] * 2)),
    "select": lambda: kernels.top_rows(torch.empty(N, 100), ranges(), 9, first=1, last=2),
    "blocks": lambda: kernels.rows_of_blocks(listed(), ranges(), ranges(), 4, longest=100),
    "quantise": lambda: quantisation.encode(data(), 4, (32, 1)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_do_not_read_tensors(name: str, grids: list[tuple[Any, ...]]) -> None:
    OPERATORS[name]()
    assert grids
    assert all(isinstance(size, int) and size > 0 for grid in grids for size in grid)


MOST_X, MOST_Y = 2**31 - 1, 65535
"""Maximum programs of a CUDA grid in its first dimension and in the two others."""


@pytest.mark.parametrize(("batch", "heads", "tokens"), [(1, 32, 131072), (16, 8, 32768), (64, 8, 16384)])
@pytest.mark.parametrize("bounded", [False, True])
def test_grids_of_large_caches_fit(
    batch: int, heads: int, tokens: int, bounded: bool, grids: list[tuple[Any, ...]]
) -> None:
    streams, stored = batch * heads, batch * heads * tokens
    q, rows = torch.empty(streams, M, D, dtype=torch.bfloat16), torch.empty(stored, D, dtype=torch.bfloat16)
    where = Ranges(*torch.empty(2, streams, dtype=torch.int64), longest=tokens if bounded else None)
    kernels.column_mass(q, Rows(Dense(rows), Dense(rows)), where, Options(0.1))
    kernels.label_scores(q, Dense(rows), where, capacity=tokens)
    assert grids
    for x, *others in grids:
        assert x <= MOST_X
        assert all(size <= MOST_Y for size in others)
    if bounded:
        assert (tokens // 64, streams) in grids  # a program for each tile of keys, none past the longest stream


def launched(rows: Rows, streams: int, longest: int | None, grids: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return the grids of one decode over streams of at most `longest` rows."""
    where = Ranges(*torch.empty(2, streams, dtype=torch.int64), longest=longest)
    kernels.decode(torch.empty(streams, M, D, dtype=torch.bfloat16), rows, where, Options(0.1))
    return grids


def test_a_short_window_is_not_split_and_not_merged(grids: list[tuple[Any, ...]]) -> None:
    assert launched(Rows(Dense(data()), Dense(data())), N, 64, grids) == [(N, 1)]


def test_splits_are_no_more_than_the_longest_stream_can_use(grids: list[tuple[Any, ...]]) -> None:
    """Four splits of two blocks, and one for the rest of the stream's blocks."""
    assert launched(Rows(Dense(data()), Dense(data())), 1, 512, grids) == [(5, 1), (M, D // CHANNELS)]


def stepped() -> Rows:
    return Rows(packed((1, D)), packed((1, D)))


RESIDENT = {
    "dense": (dense_kernel.RESIDENT, lambda: Rows(Dense(data()), Dense(data()))),
    "packed": (
        resident(
            packed_kernel.WARPS,
            packed_kernel.limits(2 * D, 4, M, stepped=True, many=True).registers,
            packed_kernel.RESIDENT,
        ),
        stepped,
    ),
    "coded": (coded_kernel.RESIDENT, flat),
}


@pytest.mark.parametrize("kind", RESIDENT)
@pytest.mark.parametrize("streams", [2, 3])
def test_all_splits_run_at_once(kind: str, streams: int, grids: list[tuple[Any, ...]]) -> None:
    limit, make = RESIDENT[kind]
    (splits, _), merged = launched(make(), streams, None, grids)
    assert splits == limit * WITHOUT_DEVICE
    assert merged == (streams * M, D // CHANNELS)


def test_fewer_programs_fit_where_each_has_more_registers() -> None:
    assert resident(2, None, 8) == resident(2, 128, 8) == 8
    assert resident(2, 168, 8) == 6
    assert resident(4, 255, 8) == 2


def test_a_warp_has_all_of_its_registers_from_one_scheduler() -> None:
    assert resident(1, 168, 99) == 12
    assert resident(1, 169, 99) == resident(1, 200, 99) == resident(1, 255, 99) == 8


def test_results_of_parts_are_merged_in_one_launch(grids: list[tuple[Any, ...]]) -> None:
    rows = Rows(Dense(data()), Dense(data()))
    parts = [kernels.Part(rows, replace(ranges(), longest=64)) for _ in range(3)]
    kernels.decode_parts(queries(), parts, Options(0.1))
    assert grids == [(N, 1)] * 3 + [(N * M, D // CHANNELS)]


def test_scores_have_the_width_of_the_capacity_without_a_host_read(grids: list[tuple[Any, ...]]) -> None:
    assert kernels.label_scores(queries(), Dense(data()), ranges(), capacity=300).shape == (N, 300)
    with pytest.raises(DataDependentOutputException):
        kernels.label_scores(queries(), Dense(data()), ranges())


def test_grids_have_at_most_65535_streams_in_their_second_dimension(grids: list[tuple[Any, ...]]) -> None:
    """Each token of a turn is a stream of its own for a selector."""
    streams = 100_000
    q, starts = torch.empty(streams, M, D, dtype=torch.bfloat16), torch.empty(streams, dtype=torch.int64)
    chosen = Listed(torch.empty(streams, 100, dtype=torch.int32), starts)
    kernels.page_bounds(q, data(), data(), Ranges(starts, starts), capacity=300)
    kernels.label_scores(q, Dense(data()), Ranges(starts, starts), capacity=300)
    kernels.rows_of_blocks(chosen, Ranges(starts, starts), Ranges(starts, starts), 4, longest=100)
    assert [second for _, second in grids] == [65535, streams - 65535] * 3
