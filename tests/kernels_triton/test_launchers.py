# SPDX-License-Identifier: Apache-2.0
"""Operators on a GPU look at shapes only, so that a step can be captured in a CUDA graph: they read no values of tensors."""

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

from kvpress.kernels.attention.triton import merge
from kvpress.kernels.quantisation import triton as quantisation

R, N, M, D = 4096, 8, 4, 64


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Grids of all kernels that are launched; tensors made meanwhile have no values, and reading one raises."""
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
    "merge": lambda: merge.merge(torch.empty(N, 5, M, D), torch.empty(N, 5, M)),
    "quantise": lambda: quantisation.encode(data(), 4, (32, 1)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_do_not_read_tensors(name: str, grids: list[tuple[Any, ...]]) -> None:
    OPERATORS[name]()
    assert grids
    assert all(isinstance(size, int) and size > 0 for grid in grids for size in grid)


def test_scores_are_of_the_width_that_is_given_and_need_no_value_for_it(grids: list[tuple[Any, ...]]) -> None:
    assert kernels.label_scores(queries(), Dense(data()), ranges(), capacity=300).shape == (N, 300)
    with pytest.raises(DataDependentOutputException):
        kernels.label_scores(queries(), Dense(data()), ranges())
