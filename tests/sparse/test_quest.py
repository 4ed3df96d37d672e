# SPDX-License-Identifier: Apache-2.0
"""Quest: bounds of pages, and the pages that are read."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpress.cache.attention import Logits, attend, merge
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment
from kvpress.core.selector import Budget
from kvpress.kernels import Pages, Ranges, page_bounds, page_rows
from kvpress.sparse.base import SelectorPress
from kvpress.sparse.infllm_v2 import InfLLMv2Press
from kvpress.sparse.quest import PageIndex, QuestPress, QuestSelector
from tests.sparse.selecting import partials_of


def segment(lengths: list[int], dim: int = 16, seed: int = 0) -> DenseSegment:
    generator = torch.Generator().manual_seed(seed)
    layout = Layout(lengths)
    keys, values = torch.randn(2, layout.total, dim, generator=generator)
    return DenseSegment(keys, values, layout, first=[0] * len(lengths))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 70), min_size=1, max_size=4), st.integers(1, 20), st.integers(1, 4), st.integers(0, 2**20)
)
def test_a_page_bounds_every_logit_in_it(lengths: list[int], size: int, groups: int, seed: int) -> None:
    sealed = segment(lengths, seed=seed)
    if not sealed.layout.total:
        return
    queries = torch.randn(len(lengths), groups, 16, generator=torch.Generator().manual_seed(seed + 1))
    index = PageIndex.build([sealed], size)
    bounds = page_bounds(queries, index.low, index.high, Ranges(*index.layout.on(queries.device)))
    for n, length in enumerate(lengths):
        logits = queries[n] @ sealed.keys[sealed.layout.rows(n)].T
        for page in range(bounds.shape[1]):
            inside = logits[:, page * size : (page + 1) * size]
            if page * size < length:
                assert float(inside.max()) <= float(bounds[n, page]) + 1e-4
            else:
                assert bounds[n, page] == -torch.inf


def test_the_best_pages_are_read() -> None:
    sealed = segment([256, 256])
    queries = torch.zeros(2, 2, 16)
    sealed.keys[100], sealed.keys[256 + 33] = 5.0, 5.0
    queries[:] = 1.0
    call: Any = SimpleNamespace(
        store=SimpleNamespace(segments=[sealed], index={}), logits=Logits(1.0), queries=queries[:, :, None]
    )
    selector = QuestPress(budget=16).selector_at(2)
    assert selector is not None
    out, lse = merge(partials_of(selector, call, queries))
    for n, position in enumerate((100, 33)):
        page = position // 16
        rows = slice(256 * n + 16 * page, 256 * n + 16 * page + 16)
        expected = attend(queries[n : n + 1], sealed.keys[None, rows], sealed.values[None, rows], call.logits)
        torch.testing.assert_close(out[n], expected[0][0])
        torch.testing.assert_close(lse[n], expected[1][0])


@pytest.mark.parametrize("split", [False, True], ids=["one segment", "two segments"])
@pytest.mark.parametrize(
    "press",
    [
        QuestPress(32, page_size=8, skip_layers=0, n_recent=8),
        QuestPress(16, page_size=8, skip_layers=0, n_sink=8, n_recent=8),
        InfLLMv2Press(32, block_size=8, kernel_size=4, stride=2, n_sink=8, n_recent=8),
    ],
)
def test_all_recent_pairs_are_read_where_the_last_block_is_not_full(press: SelectorPress, split: bool) -> None:
    """A stream reads what it reads alone, `n_recent` newest pairs among it, and no more blocks than its budget has."""
    selector = press.selector_at(0)
    assert selector is not None

    def ranks_read(lengths: list[int], streams: slice) -> list[list[int]]:
        keys = [torch.randn(length, 16, generator=torch.Generator().manual_seed(length)) for length in lengths]
        parts = [(0, 13), (13, 1000)] if split else [(0, 1000)]
        segments = []
        for begin, end in parts:
            part = torch.cat([rows[begin:end] for rows in keys])
            layout = Layout(len(rows[begin:end]) for rows in keys)
            segments.append(DenseSegment(part, part, layout, first=[min(begin, len(rows)) for rows in keys]))
        queries = torch.randn(2, 4, 2, 16, generator=torch.Generator().manual_seed(0))[:, streams].flatten(0, 1)
        call: Any = SimpleNamespace(store=SimpleNamespace(segments=segments, index={}), logits=Logits(1.0))
        selection = selector.choose(call, queries)
        assert selection is not None
        read = []
        for i in range(len(queries)):
            n, base, ranks = i % len(lengths), 0, []
            for part, pairs in zip(segments, selection[0], strict=True):
                ranks += (pairs.rows[i, : pairs.counts[i]].long() - part.layout.offsets[n] + base).tolist()
                base += part.layout.lengths[n]
            read.append(ranks)
        return read

    lengths = [65, 64, 70, 5]
    together = ranks_read(lengths, slice(None))
    for i, ranks in enumerate(together):
        length = lengths[i % 4]
        assert set(range(max(0, length - 8), length)) <= set(ranks)
        assert set(range(min(length, press.n_sink))) <= set(ranks)
        assert len({rank // 8 for rank in ranks}) <= max(4, 3 if length % 8 else 2)
        if length > 32:
            assert ranks == ranks_read([length], slice(i % 4, i % 4 + 1))[i // 4]


def test_a_budget_below_a_page_is_refused() -> None:
    with pytest.raises(
        ValueError, match="budget must be >= 16, got 8: a page has page_size=16 pairs; raise budget, or lower"
    ):
        QuestPress(8)


def test_operands_are_built_once_for_each_number_of_queries_and_each_budget() -> None:
    index = PageIndex.build([segment([40, 40])], 4)
    selector, larger = QuestSelector(Budget(12), 4), QuestSelector(Budget(20), 4)
    one, two = torch.randn(2, 2, 16), torch.randn(4, 2, 16)
    best = selector.best(None, one, index, joined=False)
    (reading,) = index.readings.values()
    selector.best(None, torch.randn(2, 2, 16), index, joined=False)
    assert list(index.readings.values()) == [reading]
    for chooser, queries, joined in ((selector, two, False), (selector, one, True), (larger, one, False)):
        chooser.best(None, queries, index, joined)
    assert len(index.readings) == 4
    pages = Pages(index.low, index.high, reading.pages.where, reading.pages.pairs, 4, 40, 10)
    expected = page_rows(one, pages, 3)
    assert torch.equal(best.rows, expected[0])
    assert torch.equal(best.counts, expected[1])
    assert larger.best(None, one, index, joined=False).rows.shape == (2, 20)
    copied = copy.deepcopy(index)
    assert torch.equal(selector.best(None, one, copied, joined=False).rows, expected[0])
    assert "readings" not in index.written()
