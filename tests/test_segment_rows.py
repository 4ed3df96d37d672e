# SPDX-License-Identifier: Apache-2.0
"""Operators get the same rows of a sealed segment for every token, until the segment changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import Logits, Partial
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.cache.storage import tensors_in
from kvpress.cache.window import Window
from kvpress.quant.codebook import CodedSegment
from tests.formats import DIM, MERGING, every_codec, segment
from tests.quant.test_codebook import embedding

KEPT = [
    "dense",
    "uniform",
    "turned",
    "balanced",
    "floats",
    "floats in blocks",
    "coded",
    "coded and rotated",
    "in a file",
]
"""Formats whose operands refer only to tensors of the segment."""


def attend(stored: Segment, queries: Tensor) -> Partial:
    return stored.attend(queries, Logits(0.2))


def plain(monkeypatch: pytest.MonkeyPatch, stored: Segment, queries: Tensor) -> Partial:
    """Return the attention of torch to the decoded pairs."""
    with monkeypatch.context() as patch:
        patch.setenv("KVPRESS_CPU_KERNELS", "0")
        return attend(stored, queries)


def same(actual: Partial, expected: Partial) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("name", KEPT)
def test_rows_are_one_object_for_all_tokens_and_of_a_copy_too(name: str) -> None:
    stored = segment(name)
    rows = stored.as_rows()
    assert rows is not None
    assert stored.as_rows() is rows
    assert copy.deepcopy(stored).attend(torch.randn(4, 2, DIM), Logits(0.2))[0].isfinite().all()
    assert stored.as_rows() is rows


@every_codec
def test_rows_that_are_kept_keep_nothing_else_alive(name: str) -> None:
    first, second = segment(name), segment(name, seed=1)
    kept = []
    for stored in (first, second):
        attend(stored, torch.randn(4, 2, DIM))
        rows = [
            (vars(part)["_read_as"] or (None, {}))[1].get("operand") for part in (stored, *getattr(stored, "parts", ()))
        ]
        kept.append({place(tensor) for tensor in tensors_in(rows)})
    shown = {place(tensor) for tensors in first.tensors().values() for tensor in tensors}
    assert kept[0] - shown <= kept[1]  # constants that all segments share, such as a rotation


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_tensors_of_an_operand_alone_are_freed_after_the_call() -> None:
    stored = segment("corrected")
    rows = stored.as_rows()
    assert rows is not None
    assert stored.as_rows() is not rows  # it stores short indexes, which are expanded for each call
    assert vars(stored)["_read_as"] is None


@every_codec
def test_new_weights_of_pairs_are_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, queries = segment(name), torch.randn(4, 3, DIM)
    before = attend(stored, queries)
    weighted = copy.deepcopy(stored)
    weighted.log_weight = torch.linspace(-3, 3, stored.layout.total)
    after = attend(weighted, queries)
    assert (after[0] - before[0]).abs().max() > 0.05
    same(after, plain(monkeypatch, weighted, queries))
    assert all(map(torch.equal, attend(stored, queries), before))  # the original of the copy reads its own weights


@every_codec
def test_pairs_that_are_taken_joined_and_moved_are_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, queries = segment(name), torch.randn(4, 3, DIM)
    attend(stored, queries)
    some = stored.take(torch.arange(0, 60, 3), Layout([7, 0, 4, 9]))
    same(attend(some, queries), plain(monkeypatch, some, queries))
    same(attend(stored, queries), plain(monkeypatch, stored, queries))
    stored.to("cpu")
    same(attend(stored, queries), plain(monkeypatch, stored, queries))


@every_codec
def test_parts_of_a_format_give_its_attention(name: str) -> None:
    stored, queries = segment(name), torch.randn(4, 3, DIM)
    parts = stored.as_parts(queries, Logits(0.2))
    if parts is None:
        # A prediction follows the operator, or no operator reads the format.
        assert name in ("without values", *MERGING)
        return
    same(kernels.decode_parts(queries, parts, kernels.Options(0.2)), attend(stored, queries))


@pytest.mark.parametrize("name", KEPT)
def test_parts_are_passed_to_kernels_once(name: str) -> None:
    stored, queries = segment(name), torch.randn(4, 3, DIM)
    (first,), (second,) = (stored.as_parts(queries, Logits(0.2)) or [] for _ in range(2))
    assert first is second
    stored.log_weight = torch.zeros(stored.layout.total)
    (renewed,) = stored.as_parts(queries, Logits(0.2)) or []
    assert renewed is not first
    assert renewed.rows.log_weight is not None


def test_short_weights_are_not_kept_in_float32() -> None:
    stored, queries = segment("uniform"), torch.randn(4, 3, DIM)
    stored.log_weight = torch.zeros(stored.layout.total, dtype=torch.float16)
    (first,), (second,) = (stored.as_parts(queries, Logits(0.2)) or [] for _ in range(2))
    assert first is second
    assert first.rows.log_weight is stored.log_weight


@pytest.mark.parametrize("name", ["uniform", "corrected", "centred"])
def test_an_operand_is_made_once_for_a_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, queries, built = segment(name), torch.randn(4, 3, DIM), []
    attend(stored, queries)
    original = type(stored).operand
    monkeypatch.setattr(type(stored), "operand", lambda self: built.append(1) or original(self))
    assert stored.as_parts(queries, Logits(0.2)) is not None
    calls = 1 if stored.computes_operands else 0
    assert len(built) == calls
    attend(stored, queries)
    assert len(built) == 2 * calls


def test_a_window_keeps_no_copy_of_the_tensors_of_a_prefill() -> None:
    keys, values = (torch.randn(2, 9, 2, DIM).transpose(1, 2) for _ in range(2))  # as projections lay them out
    window, queries = Window.empty_like(keys, values), torch.randn(4, 3, DIM)
    window.append(keys.contiguous().transpose(1, 2).contiguous().transpose(1, 2), values)
    for tokens in range(3):
        part, again = (window.as_part(queries, None) for _ in range(2))
        assert part is not None
        assert (part is again) == (tokens > 0)
        assert window.cursor is not None
        storages = {place(tensor) for tensor in (window.keys, window.values, *window.cursor.tensors())}
        assert {place(tensor) for tensor in tensors_in(window.cursor.part)} <= storages
        window.append(*(torch.randn(2, 2, 1, DIM) for _ in range(2)))


def test_a_copy_of_a_window_reads_its_own_block() -> None:
    window, queries = Window(*(torch.randn(2, 2, 9, DIM) for _ in range(2))), torch.randn(4, 3, DIM)
    options = kernels.Options(0.2)
    before = kernels.decode_parts(queries, [window.part([0, 0])], options)
    twin = copy.deepcopy(window)
    window.keys.zero_()
    assert all(map(torch.equal, kernels.decode_parts(queries, [twin.part([0, 0])], options), before))
    assert not torch.equal(kernels.decode_parts(queries, [window.part([0, 0])], options)[0], before[0])


def test_a_format_with_its_own_attention_has_no_parts() -> None:
    class Twice(DenseSegment):
        def attend(self, queries: Tensor, logits: Logits, hidden: Tensor | None = None) -> Partial:
            out, lse = super().attend(queries, logits, hidden)
            return 2 * out, lse

    plain = segment("dense")
    assert isinstance(plain, DenseSegment)
    stored, queries = Twice(plain.keys, plain.values, plain.layout), torch.randn(4, 3, DIM)
    assert stored.as_parts(queries, Logits(0.2)) is None
    assert torch.equal(stored.attend(queries, Logits(0.2))[0], 2 * plain.attend(queries, Logits(0.2))[0])


def test_tables_that_have_grown_are_read() -> None:
    stored = segment("coded and rotated")
    assert isinstance(stored, CodedSegment)
    assert stored.rotation is not None
    old, angles = stored.as_rows(), stored.rotation.angles
    angles.grow(64 * len(angles.coarse) + 500, embedding(), torch.device("cpu"), "a test")
    new = stored.as_rows()
    assert new is not old
    assert new is not None
    assert new.keys.rotary.coarse is angles.coarse  # type: ignore[union-attr]
