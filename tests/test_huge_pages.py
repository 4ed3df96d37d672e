# SPDX-License-Identifier: Apache-2.0
"""Memory for pairs that every token reads."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvpress.cache.codec import DenseCodec, Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.memory import LEAST_BYTES, empty, moved
from kvpress.cache.segment import DenseSegment
from kvpress.cache.window import Window

on_linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages to ask for")


def rows(dtype: torch.dtype = torch.bfloat16, size: int = LEAST_BYTES) -> Tensor:
    return torch.randn(size // 64 // dtype.itemsize, 64, generator=torch.Generator().manual_seed(0)).to(dtype)


def asks_for_huge_pages(tensor: Tensor) -> bool:
    """What the kernel says of the mapping that the middle of a tensor is in."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *fields = line.split()
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin <= middle < end
        elif inside and name == "VmFlags:":
            return "hg" in fields
    raise AssertionError("the tensor is in no mapping")


@on_linux
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large_rows_get_huge_pages_and_keep_their_values(dtype: torch.dtype) -> None:
    given = rows(dtype)
    found = moved(given)
    assert asks_for_huge_pages(found)
    assert found.dtype == dtype
    assert torch.equal(found, given)
    found[0] += 1
    assert not torch.equal(found, given)
    assert found.untyped_storage().nbytes() == given.nbytes


def test_small_rows_and_those_of_other_devices_stay() -> None:
    small, elsewhere = rows(size=LEAST_BYTES // 2), rows().to("meta")
    assert moved(small) is small
    assert moved(elsewhere) is elsewhere
    assert empty(elsewhere.shape, elsewhere).is_meta


class NoAdvice(mmap.mmap):
    def madvise(self, *option: int) -> None:
        raise OSError(22, "Invalid argument")


def no_mapping(*_: object, **__: object) -> mmap.mmap:
    raise OSError(12, "Cannot allocate memory")


@on_linux
@pytest.mark.parametrize("refusing", [NoAdvice, no_mapping])
def test_rows_stay_where_there_are_no_huge_pages(refusing: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", refusing)
    given = rows()
    assert moved(given) is given
    assert not asks_for_huge_pages(empty(given.shape, given))


@on_linux
def test_pairs_that_a_selector_reads_get_huge_pages() -> None:
    keys, values = rows(), rows().flip(0)
    layout = Layout([len(keys) // 4] * 4)
    sealed = DenseCodec(group=16, residual=16).encode(DenseSegment(keys, values, layout), Sealing(4, (), None))
    assert isinstance(sealed, DenseSegment)
    for held, given in ((sealed.keys, keys), (sealed.values, values)):
        assert asks_for_huge_pages(held)
        assert torch.equal(held, given)
    assert sealed.layout == layout


@on_linux
def test_a_window_that_grows_past_the_limit_gets_huge_pages_and_keeps_its_pairs() -> None:
    keys, values = (side.view(1, 4, -1, 64) for side in (rows(), rows().flip(0)))
    window = Window.empty_like(keys, values)
    window.append(keys[:, :, :-1].clone(), values[:, :, :-1].clone())
    window.append(keys[:, :, -1:], values[:, :, -1:])
    for held, given in ((window.keys, keys), (window.values, values)):
        assert asks_for_huge_pages(held)
        assert torch.equal(held[:, :, : window.length], given)
