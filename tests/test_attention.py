# SPDX-License-Identifier: Apache-2.0
"""Attention over the segments of a store equals attention over all pairs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpress.cache.attention import Logits, attend, merge
from kvpress.cache.codec import Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment
from kvpress.cache.store import KVStore
from tests.codecs import CODECS


def reference(
    queries: Tensor, keys: list[Tensor], values: list[Tensor], visible: list[Tensor], scale: float, cap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return float32 attention of `queries [N, M, D]` to whole streams, `visible[n] [M, T]`, by a plain softmax."""
    outs, lses = [], []
    for n, rows in enumerate(queries):
        logits = (rows @ keys[n].T).float() * scale
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        logits = logits.masked_fill(~visible[n], -math.inf)
        if sinks is not None:
            logits = torch.cat([logits, sinks[n][:, None]], dim=1)
        lse = logits.logsumexp(-1)
        weights = torch.where(lse[:, None] == -math.inf, 0.0, (logits - lse[:, None]).exp())
        outs.append(weights[:, : keys[n].shape[0]] @ values[n])
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    groups=st.sampled_from([1, 2, 3, 8]),
    length=st.sampled_from([1, 1, 3]),
    turns=st.lists(st.tuples(st.integers(1, 20), st.sampled_from([0.0, 0.2, 0.7, 1.0])), min_size=0, max_size=3),
    unsealed=st.integers(0, 7),
    pads=st.sampled_from([None, [0, 3], [5, 0]]),
    hide=st.integers(0, 10),
    cap=st.sampled_from([None, 3.0]),
    with_sinks=st.booleans(),
    codec=st.sampled_from([None, *CODECS]),
)
def test_attention_over_parts_is_attention_over_everything(
    groups: int, length: int, turns: list[tuple[int, float]], unsealed: int, pads: list[int] | None, hide: int,
    cap: float | None, with_sinks: bool, codec: str | None,
) -> None:  # fmt: skip
    batch, heads, dim = 2, 3, 8
    store = KVStore(torch.zeros(batch, heads, 0, dim), torch.zeros(batch, heads, 0, 4))

    def columns(hidden: int = 0) -> Tensor | None:
        if pads is None and not hidden:
            return None
        return torch.arange(store.seen) >= torch.tensor(pads or [0, 0])[:, None] + hidden

    for count, share in turns:
        store.append(torch.randn(batch, heads, count, dim), torch.randn(batch, heads, count, 4))
        opened = [*store.segments, store.open_segment(columns())]
        counts = [sum(part.layout.lengths[n] for part in opened) for n in range(batch * heads)]
        store.evict([torch.rand(n) < share for n in counts], columns())
        if codec is not None:
            store.settle(CODECS[codec][0], Sealing(store.heads, mask=columns()))
    new = unsealed + length
    store.append(torch.randn(batch, heads, new, dim), torch.randn(batch, heads, new, 4))
    hidden = min(hide, store.seen - length)
    queries = torch.randn(batch, heads * groups, length, dim)
    sinks = torch.randn(heads * groups) if with_sinks else None
    out, lse = store.attend(queries, Logits(0.3, cap), columns(hidden), sinks)

    segments = [*store.sealed, DenseSegment(
        store.window.filled_keys.reshape(-1, dim), store.window.filled_values.reshape(-1, 4),
        Layout([store.window.length] * batch * heads), first=[store.window.first] * batch * heads,
    )]  # fmt: skip
    keys, values, visible = [], [], []
    token = torch.arange(store.seen - length, store.seen).repeat(groups)
    for n in range(batch * heads):
        at = torch.cat([part.slots()[part.layout.rows(n)] for part in segments])
        read = [part.read(part.layout.rows(n)) for part in segments]
        keys.append(torch.cat([pair[0] for pair in read]))
        values.append(torch.cat([pair[1] for pair in read]))
        mask = columns(hidden)
        real = torch.ones(len(at), dtype=torch.bool) if mask is None else mask[n // heads][at.long()]
        visible.append((at <= token[:, None]) & real)
    rows = queries.reshape(batch * heads, groups * length, dim)
    extra = (
        None
        if sinks is None
        else sinks.view(heads, groups, 1).expand(-1, -1, length).reshape(heads, -1).repeat(batch, 1)
    )
    expected, expected_lse = reference(rows, keys, values, visible, 0.3, cap, extra)
    assert not out.isnan().any()
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("sealed", [0.0, 0.6, 1.0])
def test_a_row_that_sees_nothing_gives_zeros(sealed: float, with_sinks: bool) -> None:
    store = KVStore(torch.zeros(2, 2, 0, 4), torch.zeros(2, 2, 0, 4))
    store.append(torch.randn(2, 2, 8, 4), torch.randn(2, 2, 8, 4))
    store.evict([torch.rand(8) < sealed for _ in range(4)], None)
    store.append(torch.randn(2, 2, 1, 4), torch.randn(2, 2, 1, 4))
    columns = torch.ones(2, 9, dtype=torch.bool)
    columns[1] = False
    sinks = torch.randn(4) if with_sinks else None
    out, lse = store.attend(torch.randn(2, 4, 1, 4), Logits(1.0), columns, sinks)
    assert torch.equal(out[2:], torch.zeros(2, 2, 4))
    expected = torch.full((2, 2), -math.inf) if sinks is None else sinks.view(2, 2)
    torch.testing.assert_close(lse[2:], expected)
    assert not out.isnan().any()
    assert bool(out[:2].any())


@given(data=st.data(), parts=st.integers(1, 5))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_merge_is_exact_for_any_split(data: st.DataObject, parts: int) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=parts, max_size=parts))
    queries = torch.randn(2, 3, 4) * data.draw(st.sampled_from([1.0, 30.0]))
    keys, values = torch.randn(2, sum(lengths), 4), torch.randn(2, sum(lengths), 4)
    pieces, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        flat = DenseSegment(keys[:, part].reshape(-1, 4), values[:, part].reshape(-1, 4), Layout([length] * 2))
        pieces.append(flat.attend(queries, Logits(1.0)))
        start += length
    out, lse = merge(pieces)
    seen = [torch.ones(3, sum(lengths), dtype=torch.bool)] * 2
    expected, expected_lse = reference(queries, list(keys), list(values), seen, 1.0, None, None)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


@given(seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_the_order_of_pairs_does_not_matter(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layout = Layout(torch.randint(0, 9, (4,), generator=generator).tolist())
    keys, values = (torch.randn(layout.total, 8, generator=generator) for _ in range(2))
    order = torch.cat([
        torch.randperm(n, generator=generator) + start for n, start in zip(layout.lengths, layout.offsets, strict=False)
    ]) if layout.total else torch.zeros(0, dtype=torch.long)  # fmt: skip
    queries = torch.randn(4, 2, 8, generator=generator)
    shuffled = DenseSegment(keys[order], values[order], layout).attend(queries, Logits(0.4))
    expected = DenseSegment(keys, values, layout).attend(queries, Logits(0.4))
    for a, b in zip(shuffled, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_ragged_layout_of_equal_lengths_is_dense_and_one_pair_is_its_value() -> None:
    keys, values, queries = torch.randn(12, 8), torch.randn(12, 8), torch.randn(4, 2, 8)
    dense = DenseSegment(keys, values, Layout([3] * 4)).attend(queries, Logits(0.4))
    ragged = super(DenseSegment, DenseSegment(keys, values, Layout([3] * 4))).attend(queries, Logits(0.4))
    for a, b in zip(dense, ragged, strict=True):
        torch.testing.assert_close(a, b)
    out, _ = DenseSegment(keys[:4], values[:4], Layout([1, 0, 2, 1])).attend(queries, Logits(0.4))
    torch.testing.assert_close(out[0], values[:1].expand(2, -1))
    torch.testing.assert_close(out[3], values[3:4].expand(2, -1))
    assert not out[1].any()


@pytest.mark.parametrize("visible", [None, "row", "all"])
def test_many_queries_in_blocks_equal_all_at_once(visible: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    queries, keys, values = torch.randn(3, 2, 37, 16).unbind(0)
    mask = None if visible is None else torch.rand(2, 1 if visible == "row" else 37, 37) < 0.7
    at_once = attend(queries, keys, values, Logits(0.3), mask)
    monkeypatch.setattr("kvpress.cache.attention.BLOCK_BYTES", 4 * 2 * 37 * 5)
    blocks = attend(queries, keys, values, Logits(0.3), mask)
    torch.testing.assert_close(blocks, at_once)
