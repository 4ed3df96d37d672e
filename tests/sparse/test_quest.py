"""Quest: bounds, exactness, what is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.attention import Logits, attend, merge
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.sparse.quest import PageIndex, QuestPress
from tests.models import padded_batch, tiny_model, tokens

STORAGE = [
    "quest:budget={}",
    "adakv(snapkv:0.3,window_size=4) + quest:budget={}",
    "kivi:bits=8,residual_length=16 + quest:budget={}",
    "adakv(snapkv:0.3,window_size=4) + kivi:bits=4,residual_length=16 + quest:budget={}",
]


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
    part = segment(lengths, seed=seed)
    if not part.layout.total:
        return
    queries = torch.randn(len(lengths), groups, 16, generator=torch.Generator().manual_seed(seed + 1))
    bounds = PageIndex.build(part, size).bounds(queries)
    for n, length in enumerate(lengths):
        logits = queries[n] @ part.keys[part.layout.rows(n)].T
        for page in range(bounds.shape[1]):
            inside = logits[:, page * size : (page + 1) * size]
            if page * size < length:
                assert float(inside.max()) <= float(bounds[n, page]) + 1e-4
            else:
                assert bounds[n, page] == -torch.inf


def prefilled(spec: str, padded: bool) -> tuple[Any, DynamicCache, Tensor | None]:
    model = tiny_model("llama")
    ids, mask = padded_batch([300, 190]) if padded else (tokens(2, 300), None)
    cache = DynamicCache(config=model.config)
    at = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)
    with kvpress.get_press(spec)(model):
        model(ids, attention_mask=mask, past_key_values=cache, position_ids=at)
    return model, cache, mask


def step(model: Any, cache: DynamicCache, mask: Tensor | None, spec: str) -> Tensor:
    grown = None if mask is None else torch.cat([mask, mask.new_ones(2, 1)], dim=1)
    at = None if grown is None else grown.sum(1, keepdim=True) - 1
    with kvpress.reading(model, kvpress.get_press(spec)):
        return model(tokens(2, 1, seed=8), attention_mask=grown, past_key_values=cache, position_ids=at).logits


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("storage", STORAGE)
def test_a_budget_of_everything_is_exact(storage: str, padded: bool) -> None:
    spec = storage.format(512)
    whole = step(*prefilled(spec, padded), "none")
    torch.testing.assert_close(step(*prefilled(spec, padded), spec), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("storage", STORAGE)
def test_fewer_pairs_equal_attention_with_the_rest_masked(
    storage: str, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever rows are returned, the result is dense attention to exactly those rows, for every storage format."""
    checked = []

    def checking(self: Segment, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor) -> Any:
        found = read_rows(self, queries, logits, rows, counts)
        keys, values = self.read(slice(None))
        for n in range(self.layout.streams):
            own = torch.zeros(self.layout.total, dtype=torch.bool)
            own[rows[n][: counts[n]]] = True
            span = self.layout.rows(n)
            assert not own[: span.start].any()
            assert not own[span.stop :].any()
            expected = attend(queries[n : n + 1], keys[None], values[None], logits, own[None, None])
            torch.testing.assert_close(found[0][n : n + 1], expected[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(found[1][n : n + 1], expected[1], atol=1e-5, rtol=1e-4)
            checked.append(int(own.sum()))
        return found

    spec = storage.format(64)
    state = prefilled(spec, padded)
    monkeypatch.setattr("kvpress.kernels.serves", lambda queries, storage: False)
    read_rows = Segment.attend_rows
    monkeypatch.setattr(Segment, "attend_rows", checking)
    logits = step(*state, spec)
    assert torch.isfinite(logits).all()
    assert checked
    assert max(checked) <= 64


def test_budget_counts_what_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, mask = prefilled("quest:budget=64,skip_layers=1", padded=False)
    monkeypatch.setattr("kvpress.kernels.serves", lambda queries, storage: False)
    read = []
    original = Segment.attend_rows

    def counting(self: Segment, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor) -> Any:
        read.append(int(counts.sum()))
        return original(self, queries, logits, rows, counts)

    monkeypatch.setattr(Segment, "attend_rows", counting)
    step(model, cache, mask, "quest:budget=64,skip_layers=1")
    streams, layers = 4, 2
    assert 0 < sum(read) <= streams * layers * 64


def test_the_best_pages_are_read() -> None:
    part = segment([256, 256])
    queries = torch.zeros(2, 2, 16)
    part.keys[100], part.keys[256 + 33] = 5.0, 5.0
    queries[:] = 1.0
    selector = QuestPress(budget=16).selector

    class Store:
        segments = (part,)

    logits = Logits(1.0)
    out, lse = merge(selector.attend(queries, logits, Store()))  # type: ignore[arg-type]
    for n, at in enumerate((100, 33)):
        page = at // 16
        rows = slice(256 * n + 16 * page, 256 * n + 16 * page + 16)
        expected = attend(queries[n : n + 1], part.keys[None, rows], part.values[None, rows], logits)
        torch.testing.assert_close(out[n], expected[0][0])
        torch.testing.assert_close(lse[n], expected[1][0])


def test_the_index_of_a_grown_cache_equals_one_built_at_once() -> None:
    model = tiny_model("llama")
    ids = tokens(1, 400)
    press = QuestPress(budget=64, skip_layers=0)
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids[:, :150], past_key_values=cache)
        for start in range(150, 400):
            model(ids[:, start : start + 1], past_key_values=cache)
    store = cache.layers[0].store
    assert len(store.segments) <= 4
    for part in store.segments:
        fresh = PageIndex.build(part, 16)
        held = press.selector._index(part)
        assert torch.equal(fresh.low, held.low)
        assert torch.equal(fresh.high, held.high)


def test_nothing_is_evicted() -> None:
    _, cache, _ = prefilled("quest:budget=64", padded=False)
    report = kvpress.memory_report(cache)
    assert report.kept == report.seen
