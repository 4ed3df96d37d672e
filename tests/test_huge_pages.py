# SPDX-License-Identifier: Apache-2.0
"""Memory for pairs that every token reads."""

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
    """What the kernel says of the mapping that the middle of each tensor is in."""
    mappings = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *fields = line.split()
        if not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
        elif name == "VmFlags:":
            mappings.append((begin, end, "hg" in fields))
    middles = [tensor.data_ptr() + tensor.nbytes // 2 for tensor in tensors]
    found = [asked for middle in middles for begin, end, asked in mappings if begin <= middle < end]
    assert len(found) == len(tensors), "a tensor is in no mapping"
    return found


@on_linux
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_large_rows_get_huge_pages_and_keep_their_values(dtype: torch.dtype) -> None:
    given = rows(dtype)
    found = moved(given)
    assert asks_for_huge_pages(found) == [True]
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


def test_pinned_rows_stay_for_the_device_that_fetches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = rows()
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor is given)
    assert moved(given) is given


@on_linux
def test_rows_that_lie_on_huge_pages_are_not_copied_again() -> None:
    found = moved(rows())
    assert moved(found) is found
    assert moved(found[1:]).data_ptr() == found[1:].data_ptr()


@on_linux
@pytest.mark.parametrize("refusing", [NoAdvice, no_mapping])
def test_rows_stay_where_there_are_no_huge_pages(refusing: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "mmap", refusing)
    given = rows()
    assert moved(given) is given
    assert asks_for_huge_pages(empty(given.shape, given)) == [False]


def stored(held: Held) -> list[Tensor]:
    """What a format has for every pair, or group of pairs."""
    found = []
    for name in held.stored_names():
        value, kind = getattr(held, name), held.declared()[name].kind
        if isinstance(value, Held) and not isinstance(value, Axis):
            found += stored(value)
        elif isinstance(value, Tensor) and kind in ("pair", "group") and value.numel():
            found.append(value)
    return found


@on_linux
@every_codec
def test_pairs_of_every_format_get_huge_pages_and_keep_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LEAST_BYTES", 1)
    given = segment(name, [16] * 4)
    keys, values = given.read(slice(None))
    if name != "in a file":
        given.put(None)
    some = torch.arange(4, given.layout.total)
    for found, first in (
        (given, 0),
        (given.take(some, Layout([12, 16, 16, 16])), 4),
        (given.take(torch.arange(given.layout.total), given.layout), 0),
        (Segment.join([given, given]).take(torch.arange(4 * 32).view(4, 2, 16)[:, 1].flatten(), given.layout), 0),
    ):
        assert len(stored(found)) >= 2
        if name != "in a file":
            assert all(asks_for_huge_pages(*stored(found)))
        assert torch.equal(found.read(slice(None))[0], keys[first:])
        assert torch.equal(found.read(slice(None))[1], values[first:])


@on_linux
def test_what_is_encoded_while_a_model_runs_gets_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
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
    given = torch.ones(4, 2, requires_grad=True)
    (memory.taken(given, torch.tensor([1, 1])).sum() + memory.joined([given, given]).sum()).backward()
    assert given.grad is not None
    assert given.grad.tolist() == [[2, 2], [4, 4], [2, 2], [2, 2]]
    memory.joined([torch.ones(4, 2), given]).sum().backward()
    assert given.grad.tolist() == [[3, 3], [5, 5], [3, 3], [3, 3]]


@on_linux
def test_a_window_that_grows_past_the_limit_gets_huge_pages_and_keeps_its_pairs() -> None:
    keys, values = (side.view(1, 4, -1, 64) for side in (rows(), rows().flip(0)))
    window = Window.empty_like(keys, values)
    window.append(keys[:, :, :-1].clone(), values[:, :, :-1].clone())
    window.append(keys[:, :, -1:], values[:, :, -1:])
    for held, given in ((window.keys, keys), (window.values, values)):
        assert asks_for_huge_pages(held) == [True]
        assert torch.equal(held[:, :, : window.length], given)
