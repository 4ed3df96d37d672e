"""Launchers look at shapes only, so that a step can be captured in a CUDA graph: they read no values of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from kvpress.kernels import label_scores
from kvpress.kernels.coded import STEP
from kvpress.kernels.correction import Correction
from kvpress.kernels.packed import Packed

pytest.importorskip("triton", reason="triton is not installed")

from triton.runtime.jit import KernelInterface

from kvpress.kernels.triton import columns, dense, lookup, merge, pack, pages, uniform

R, N, M, D = 4096, 8, 4, 64


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Grids of all kernels that are launched; tensors made meanwhile have no values, and reading one raises."""
    launched: list[tuple[Any, ...]] = []

    def launch(kernel: object, grid: tuple[Any, ...]) -> Callable[..., None]:
        return lambda *args, **options: launched.append(grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", launch)
    with FakeTensorMode():
        yield launched


def queries() -> Tensor:
    return torch.empty(N, M, D, dtype=torch.bfloat16)


def rows() -> Tensor:
    return torch.empty(R, D, dtype=torch.bfloat16)


def streams() -> dict[str, Tensor]:
    return {name: torch.empty(N, dtype=torch.int64) for name in ("starts", "lengths")}


def listed() -> dict[str, Tensor]:
    return {"rows": torch.empty(N, 100, dtype=torch.int32), "counts": torch.empty(N, dtype=torch.int64)}


def packed(group: tuple[int, int]) -> Packed:
    scale = torch.empty(R // group[0], D // group[1], dtype=torch.float16)
    return Packed(torch.empty(R, D // 2, dtype=torch.uint8), scale, scale, 4, group)


def correction() -> Correction:
    factor, basis = torch.empty(R, 2, dtype=torch.float16), torch.empty(9, 2, D, dtype=torch.float16)
    first, channel = torch.empty(R + 1, dtype=torch.int32), torch.empty(99, dtype=torch.uint8)
    return Correction(factor, basis, torch.empty(R, dtype=torch.int32), first, channel, torch.empty(99).half())


def sides() -> dict[str, Any]:
    terms = {"key_correction": correction(), "value_correction": correction()}
    return {"q": queries(), "keys": packed((32, 1)), "values": packed((1, 32)), "scale": 0.1} | terms


def coded() -> dict[str, Any]:
    codes, book = torch.empty(R, D // 4, dtype=torch.uint8), torch.empty(2, D // 4, 256, 4)
    turn = {"coarse": torch.empty(9, 2, D // 2), "fine": torch.empty(STEP, 2, D // 2)}
    turn |= {"shift": torch.empty(N, dtype=torch.int64), "positions": torch.empty(R, dtype=torch.int32)}
    books = {"key_codes": codes, "key_book": book, "value_codes": codes, "value_book": book}
    return books | turn | {"q": queries(), "scale": 0.1, "book_of_stream": torch.empty(N, dtype=torch.int64)}


LAUNCHERS: dict[str, Callable[[], Any]] = {
    "dense_decode": lambda: dense.dense_decode(queries(), rows(), rows(), **streams(), scale=0.1, capacity=2000),
    "dense_select": lambda: dense.dense_select(queries(), rows(), rows(), **listed(), scale=0.1),
    "uniform_decode": lambda: uniform.uniform_decode(**sides(), **streams()),
    "uniform_select": lambda: uniform.uniform_select(**sides(), **listed()),
    "lookup_decode": lambda: lookup.lookup_decode(**coded(), **streams()),
    "lookup_select": lambda: lookup.lookup_select(**coded(), **listed()),
    "columns": lambda: columns.columns(
        queries(), rows(), **streams(), scale=0.1, sinks=torch.empty(N, M), row_weights=torch.empty(N, M)
    ),
    "scores": lambda: pages.scores(queries(), rows(), rows(), *streams().values(), "max", 100),
    "scores of codes": lambda: pages.scores(queries(), None, packed((1, D)), *streams().values(), "max", 100),
    "merge": lambda: merge.merge(torch.empty(N, 5, M, D), torch.empty(N, 5, M)),
    "quantise": lambda: pack.quantise(rows(), 4, (32, 1)),
}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers_do_not_read_tensors(name: str, grids: list[tuple[Any, ...]]) -> None:
    LAUNCHERS[name]()
    assert grids
    assert all(isinstance(size, int) and size > 0 for grid in grids for size in grid)


def test_scores_are_of_the_width_that_is_given_and_need_no_value_for_it(grids: list[tuple[Any, ...]]) -> None:
    assert label_scores(queries(), rows(), **streams(), capacity=300).shape == (N, 300)
    with pytest.raises(DataDependentOutputException):
        label_scores(queries(), rows(), **streams())
