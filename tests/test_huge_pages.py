# SPDX-License-Identifier: Apache-2.0
"""Huge pages for pairs that every token reads."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.cache import memory
from kvpress.cache.layout import Layout
from kvpress.cache.memory import LEAST_BYTES, empty, moved
from kvpress.cache.segment import Segment
from kvpress.cache.storage import Axis, Held
from kvpress.cache.window import Window
from tests.formats import every_codec, segment
from tests.models import tiny_model, tokens

on_linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages to ask for")


def rows(dtype: torch.dtype = torch.bfloat16, size: int = LEAST_BYTES) -> Tensor:
    return torch.randn(size // 64 // dtype.itemsize, 64, generator=torch.Generator().manual_seed(0)).to(dtype)


def asks_for_huge_pages(*tensors: Tensor) -> list[bool]:
    """Return, for each tensor, whether the kernel was advised to use huge pages for its middle."""
    mappings = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *fields = line.split()
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
        elif name == "VmFlags:":
            mappings.append((begin, end, "hg" in fields))
    middles = [tensor.data_ptr() + tensor.nbytes // 2 for tensor in tensors]
    flags = [advised for middle in middles for begin, end, advised in mappings if begin <= middle < end]
    assert len(flags) == len(tensors), "a tensor is in no mapping"
    return flags


@on_linux
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large_rows_get_huge_pages_and_keep_their_values(dtype: torch.dtype) -> None:
    source = rows(dtype)
    copied = moved(source)
    assert asks_for_huge_pages(copied) == [True]
    assert copied.dtype == dtype
    assert torch.equal(copied, source)
    copied[0] += 1
    assert not torch.equal(copied, source)
    assert copied.untyped_storage().nbytes() == source.nbytes


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


def test_pinned_rows_stay_for_the_device_that_fetches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = rows()
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor is pinned)
    assert moved(pinned) is pinned


@on_linux
def test_rows_that_lie_on_huge_pages_are_not_copied_again() -> None:
    copied = moved(rows())
    assert moved(copied) is copied
    assert moved(copied[1:]).data_ptr() == copied[1:].data_ptr()


@on_linux
@pytest.mark.parametrize("refusing", [NoAdvice, no_mapping])
def test_rows_stay_where_there_are_no_huge_pages(refusing: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", refusing)
    source = rows()
    assert moved(source) is source
    assert asks_for_huge_pages(empty(source.shape, source)) == [False]


def stored(declared: Held) -> list[Tensor]:
    """Return the tensors of a format with an entry for every pair, or group of pairs."""
    tensors = []
    for name in declared.stored_names():
        value, kind = getattr(declared, name), declared.declared()[name].kind
        if isinstance(value, Held) and not isinstance(value, Axis):
            tensors += stored(value)
        elif isinstance(value, Tensor) and kind in ("pair", "group") and value.numel():
            tensors.append(value)
    return tensors


@on_linux
@every_codec
def test_pairs_of_every_format_get_huge_pages_and_keep_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LEAST_BYTES", 1)
    original = segment(name, [16] * 4)
    keys, values = original.read(slice(None))
    if name != "in a file":
        original.put(None)
    some = torch.arange(4, original.layout.total)
    for stored_segment, first in (
        (original, 0),
        (original.take(some, Layout([12, 16, 16, 16])), 4),
        (original.take(torch.arange(original.layout.total), original.layout), 0),
        (
            Segment.join([original, original]).take(
                torch.arange(4 * 32).view(4, 2, 16)[:, 1].flatten(), original.layout
            ),
            0,
        ),
    ):
        assert len(stored(stored_segment)) >= 2
        if name != "in a file":
            assert all(asks_for_huge_pages(*stored(stored_segment)))
        assert torch.equal(stored_segment.read(slice(None))[0], keys[first:])
        assert torch.equal(stored_segment.read(slice(None))[1], values[first:])


@on_linux
def test_codes_written_while_a_model_runs_get_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LEAST_BYTES", 1)
    model = tiny_model("llama")
    for spec in (
        "kivi:bits=4,group_size=4,residual_length=4",
        "snapkv:0.5,window_size=8",
        "quest:budget=16,page_size=8,skip_layers=0",
    ):
        with kvpress.get_press(spec)(model) as session:
            model.generate(tokens(2, 100), max_new_tokens=12, do_sample=False)
        for layer in session.cache.layers:
            assert layer.store.sealed
            assert all(asks_for_huge_pages(*(tensor for part in layer.store.sealed for tensor in stored(part))))


def test_parts_of_several_types_are_joined_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LEAST_BYTES", 1)
    parts = [torch.ones(3, 4, dtype=torch.float16), torch.full((2, 4), 1e-9)]
    assert torch.equal(memory.joined(parts), torch.cat(parts))
    assert torch.equal(memory.joined([parts[0].T, parts[0].T], dim=1), torch.cat([parts[0].T] * 2, dim=1))


@torch.enable_grad()
def test_rows_with_a_gradient_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LEAST_BYTES", 1)
    source = torch.ones(4, 2, requires_grad=True)
    (memory.taken(source, torch.tensor([1, 1])).sum() + memory.joined([source, source]).sum()).backward()
    assert source.grad is not None
    assert source.grad.tolist() == [[2, 2], [4, 4], [2, 2], [2, 2]]
    memory.joined([torch.ones(4, 2), source]).sum().backward()
    assert source.grad.tolist() == [[3, 3], [5, 5], [3, 3], [3, 3]]


@on_linux
def test_a_window_that_grows_past_the_limit_gets_huge_pages_and_keeps_its_pairs() -> None:
    keys, values = (side.view(1, 4, -1, 64) for side in (rows(), rows().flip(0)))
    window = Window.empty_like(keys, values)
    window.append(keys[:, :, :-1].clone(), values[:, :, :-1].clone())
    window.append(keys[:, :, -1:], values[:, :, -1:])
    for grown, written in ((window.keys, keys), (window.values, values)):
        assert asks_for_huge_pages(grown) == [True]
        assert torch.equal(grown[:, :, : window.length], written)
