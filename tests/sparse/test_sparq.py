# SPDX-License-Identifier: Apache-2.0
"""SparQ: the pairs that are read, the mean value of the unread pairs, and the second copy of the keys."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.cache import attention
from kvpress.cache.attention import Logits, group_queries, merge
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.cache.store import KVStore
from kvpress.hf.models import facts_of
from kvpress.plan import Geometry, plan
from kvpress.sparse.sparq import Shared, SparQPress, _stream_groups
from tests.models import full_layers, grow, padded_batch, position_ids, tiny_model, tokens
from tests.pairwise import every_pair
from tests.sparse.selecting import (
    STORAGE,
    assert_rows_decode_as_alone,
    build,
    grouped_model,
    partials_of,
    prefilled,
    step,
)

SPEC = "sparq:budget={budget},channels=8"
PLAIN = SPEC + ",mean_value=false"
every_storage = pytest.mark.parametrize("storage", STORAGE)
padded_or_not = pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])

DIM, GROUPS, HEADS = 16, 3, 2
LENGTHS = [[40, 0, 25, 33], [7, 12, 3, 20]]


def segment(lengths: list[int], seed: int) -> DenseSegment:
    layout = Layout(lengths)
    keys, values = torch.randn(2, layout.total, DIM, generator=torch.Generator().manual_seed(seed))
    return DenseSegment(keys, values, layout, first=[0] * len(lengths))


def call_of(segments: list[Any], queries: Tensor, softcap: float | None = None) -> Any:
    """Return a call of `queries [B, Hq, Q, D]` on these segments."""
    store = SimpleNamespace(segments=segments, batch=len(queries), heads=HEADS)
    return SimpleNamespace(store=store, logits=Logits(0.3, softcap), queries=queries)


def expected_attention(
    segments: list[DenseSegment], n: int, q: Tensor, channels: int, budget: int, mean: bool, softcap: float | None
) -> tuple[Tensor, set[int]]:
    """Return SparQ's output for query heads `q [G, D]` of stream n, in float64, and the ranks of the pairs that are read."""
    q = q.double()
    rows = [s.layout.rows(n) for s in segments]
    keys = torch.cat([s.keys[span] for s, span in zip(segments, rows, strict=True)]).double()
    values = torch.cat([s.values[span] for s, span in zip(segments, rows, strict=True)]).double()
    weights = [
        torch.zeros(s.layout.lengths[n]) if s.log_weight is None else s.log_weight[span]
        for s, span in zip(segments, rows, strict=True)
    ]
    weight = torch.cat(weights).double()

    def softmax(products: Tensor, scale: Tensor | float) -> Tensor:
        logits = products * scale
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        return torch.softmax(logits + weight, dim=-1)

    largest = q.abs().sum(0).argsort(descending=True)[:channels]
    few = q[:, largest]
    # The paper divides by sqrt(D * |q_r|_1 / |q|_1); here the layer's scale replaces 1 / sqrt(D).
    factor = (q.abs().sum(1, keepdim=True) / few.abs().sum(1, keepdim=True)).sqrt()
    shares = softmax(few @ keys[:, largest].T, 0.3 * factor)
    read = shares.sum(0).argsort(descending=True)[:budget]
    exact = softmax(q @ keys.T, 0.3)[:, read]
    out = (exact / exact.sum(-1, keepdim=True)) @ values[read]
    if mean and budget < len(keys):
        alpha = shares[:, read].sum(-1, keepdim=True)
        out = alpha * out + (1 - alpha) * (weight.exp() @ values / weight.exp().sum())
    return out, set(read.tolist())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("channels", "budget"), [(4, 10), (DIM, 5), (40, 16), (1, 1)])
def test_the_output_is_that_of_the_formula_in_float64(
    channels: int, budget: int, softcap: float | None, mean: bool, weighted: bool
) -> None:
    segments = [segment(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    for seed, sealed in enumerate(segments if weighted else []):
        sealed.log_weight = torch.randn(sealed.layout.total, generator=torch.Generator().manual_seed(9 + seed))
    queries = torch.randn(2, HEADS * GROUPS, 1, DIM, generator=torch.Generator().manual_seed(5))
    call = call_of(segments, queries, softcap)
    rows = group_queries(queries, HEADS)
    selector = SparQPress(budget, channels, mean).selector_at(0)
    out, lse = merge(partials_of(selector, call, rows))
    assert torch.isfinite(lse).all()
    for n in range(4):
        expected, read = expected_attention(segments, n, rows[n], channels, budget, mean, softcap)
        torch.testing.assert_close(out[n].double(), expected, atol=1e-5, rtol=1e-5)
        chosen, ranks_read = zip(segments, call.read[0], strict=True), set()
        for i, (sealed, pairs) in enumerate(chosen):
            ranks = pairs.rows[n, : pairs.counts[n]].long() - sealed.layout.offsets[n]
            ranks_read |= set((ranks + i * LENGTHS[0][n]).tolist())
        assert ranks_read == read


def test_all_channels_choose_the_pairs_with_the_largest_products() -> None:
    sealed, queries = segment([60, 60], 0), torch.randn(1, HEADS, 1, DIM, generator=torch.Generator().manual_seed(1))
    call = call_of([sealed], queries)
    SparQPress(7, DIM, False).selector_at(0).attend(call, queries[0])
    for n in range(2):
        best = (sealed.keys[sealed.layout.rows(n)] @ queries[0, n, 0]).topk(7).indices + 60 * n
        assert set(call.read[0][0].rows[n].tolist()) == set(best.tolist())


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e4])
def test_extreme_queries_give_finite_results(size: float) -> None:
    segments = [segment(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    queries = size * torch.randn(2, HEADS * GROUPS, 1, DIM, generator=torch.Generator().manual_seed(5))
    selector = SparQPress(6, 4).selector_at(0)
    for result in merge(partials_of(selector, call_of(segments, queries), group_queries(queries, HEADS))):
        assert torch.isfinite(result).all()


def test_streams_without_sealed_pairs_add_nothing() -> None:
    queries = torch.randn(1, HEADS, 1, DIM, generator=torch.Generator().manual_seed(5))
    out, lse = merge(partials_of(SparQPress(6, 4).selector_at(0), call_of([segment([0, 30], 0)], queries), queries[0]))
    assert not out[0].any()
    assert lse[0].isneginf().all()
    assert torch.isfinite(out).all()


def test_sinks_and_recent_pairs_are_read() -> None:
    sealed, queries = segment([60, 60], 0), torch.randn(1, HEADS, 1, DIM, generator=torch.Generator().manual_seed(1))
    call = call_of([sealed], queries)
    SparQPress(16, 4, n_sink=3, n_recent=8).selector_at(0).attend(call, queries[0])
    for n in range(2):
        assert {60 * n, 60 * n + 2, *range(60 * n + 52, 60 * n + 60)} <= set(call.read[0][0].rows[n].tolist())


# -- inside a model ----------------------------------------------------------------------------------------------------


@every_storage
@padded_or_not
def test_a_budget_of_all_pairs_is_exact(storage: str, padded: bool) -> None:
    press = build(SPEC, 512, storage)
    model, cache, mask = prefilled(press, padded)
    for new in (tokens(2, 1, seed=8), tokens(2, 5, seed=8)):
        expected, logits = (
            step(model, copy.deepcopy(cache), mask, reader, new) for reader in (kvpress.NonePress(), press)
        )
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spec", [SPEC, PLAIN], ids=["mean", "plain"])
@every_storage
def test_a_padded_row_decodes_as_if_it_were_alone(storage: str, spec: str) -> None:
    press = build(spec, 32, storage)
    assert_rows_decode_as_alone(press)


@every_pair(
    padded={"even": False, "padded": True},
    storage=STORAGE.keys(),
    segments=["one segment", "several segments"],
    blocks=["one block", "many blocks"],
)
def test_several_new_tokens_equal_one_by_one(
    padded: bool, storage: str, segments: str, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    press, new = build(SPEC, 32, storage), tokens(2, 5, seed=8)
    if segments == "several segments":
        monkeypatch.setattr(KVStore, "_join_tail", lambda store: None)
    model, cache, mask = prefilled(press, padded)
    if segments == "several segments":
        step(model, cache, mask, press, tokens(2, 100, seed=3))
        mask = grow(mask, 100)
    if blocks == "many blocks":
        monkeypatch.setattr(attention, "BLOCK_BYTES", 2**16)
    twin, one_by_one = copy.deepcopy(cache), []
    together = step(model, cache, mask, press, new)
    for t in range(5):
        one_by_one.append(step(model, twin, mask, press, new[:, t : t + 1]))
        mask = grow(mask, 1)
    torch.testing.assert_close(together, torch.cat(one_by_one, dim=1), atol=1e-4, rtol=1e-4)


@every_storage
def test_cropping_and_reordering_rows_restore_the_choice(storage: str) -> None:
    press = build(SPEC, 32, storage)
    model, cache, _ = prefilled(press, padded=False)
    expected = step(model, copy.deepcopy(cache), None, press)
    for seed in range(3):
        step(model, cache, None, press, tokens(2, 1, seed=20 + seed))
    cache.crop(-3)
    cache.batch_select_indices(torch.tensor([1, 0]))
    logits = step(model, cache, None, press, tokens(2, 1, seed=8).flip(0))
    torch.testing.assert_close(logits.flip(0), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("groups", [1, 4, 8])
def test_groups_of_every_size_work(groups: int) -> None:
    model = grouped_model(groups)
    assert torch.isfinite(step(*prefilled(build(SPEC, 32, model=model), True, model), build(SPEC, 32))).all()
    dense_press = build(SPEC, 512, model=model)
    _, cache, mask = prefilled(dense_press, True, model)
    exact = step(model, copy.deepcopy(cache), mask, kvpress.NonePress())
    torch.testing.assert_close(step(model, cache, mask, dense_press), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3_text", "gpt_oss"])
def test_the_mean_value_raises_the_error_of_no_family(family: str) -> None:
    """With four channels and eight pairs, unread pairs hold much of the attention."""
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    ids, mask = padded_batch([300, 260, 190])
    errors = dict.fromkeys(("mean", "plain"), 0.0)
    for name in errors:
        press = SparQPress(8, 4, name == "mean")
        cache = DynamicCache(config=model.config)
        with press(model):
            model(ids, attention_mask=mask, past_key_values=cache, position_ids=position_ids(mask))
        assert all(cache.layers[i].store.segments for i in full_layers(model))
        for seed in range(8):
            logits = []
            for reader in (kvpress.NonePress(), press):
                grown = grow(mask, 1)
                with kvpress.reading(model, reader):
                    at = position_ids(grown, 1)
                    new = tokens(3, 1, seed=seed)
                    logits.append(
                        model(new, attention_mask=grown, past_key_values=copy.deepcopy(cache), position_ids=at).logits
                    )
            assert torch.isfinite(logits[1]).all()
            errors[name] += float((logits[1] - logits[0]).square().sum())
    assert errors["mean"] < 1.02 * errors["plain"]


def index_of(segment: Segment) -> list[Tensor]:
    keys, (mean, lse) = segment.index["sparq"]
    return [keys, mean, lse]


def test_the_index_of_ragged_heads_stores_every_key_once() -> None:
    model = tiny_model("llama")
    with kvpress.get_press("adakv(knorm:0.3) + sparq:budget=16")(model) as session:
        model.generate(tokens(2, 400), max_new_tokens=3)
    segments = [sealed for layer in session.cache.layers for sealed in layer.store.segments]
    assert not all(sealed.layout.uniform for sealed in segments)
    for sealed in segments:
        assert index_of(sealed)[0].shape == (sealed.layout.total * 32,)


@pytest.mark.parametrize("storage", ["dense", "packed"])
def test_an_index_that_grew_equals_one_that_is_built_at_once(storage: str) -> None:
    press = build(SPEC, 64, storage)
    model, cache, _ = prefilled(press, padded=False, lengths=(150, 150))
    for seed in range(100):
        step(model, cache, None, press, tokens(2, 1, seed=seed))
    selector = press.recipe(facts_of(model)).selector_at(0)
    for layer in cache.layers:
        for sealed in layer.store.segments:
            grown, sealed.index = index_of(sealed), {}
            selector.prepare(layer.store)
            for ours, theirs in zip(grown, index_of(sealed), strict=True):
                assert torch.equal(ours, theirs)
            keys, values = sealed.read(slice(None))
            stored = [stream.mT for group in _stream_groups(grown[0], sealed.layout) for stream in group.keys]
            assert torch.equal(torch.cat(stored), keys)
            mean = values.unflatten(0, (sealed.layout.streams, -1)).mean(1)
            torch.testing.assert_close(grown[1][:, 0], mean, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(
                grown[2], torch.full_like(grown[2], math.log(sealed.layout.longest)), atol=1e-4, rtol=0
            )


@pytest.mark.parametrize(
    "spec",
    ["sparq", "sparq:channels=16,mean_value=false", "snapkv:0.5 + sparq", "kivi:bits=4 + sparq", "turboquant + sparq"],
)
def test_the_plan_counts_the_second_copy_of_the_keys(spec: str) -> None:
    model, press = kvpress.load_model("reference")[0], kvpress.get_press(spec)
    ids = torch.randint(3, model.config.vocab_size, (2, 1024), generator=torch.Generator().manual_seed(0))
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, past_key_values=cache, logits_to_keep=1)
    report = kvpress.memory_report(cache)
    segments = [sealed for layer in cache.layers for sealed in layer.store.segments]
    expected = sum(sealed.layout.total for sealed in segments) * model.config.head_dim * model.dtype.itemsize
    assert sum(index_of(sealed)[0].nbytes for sealed in segments) == expected
    assert plan(press, Geometry.of(model.config), 1024, 2).total_bytes == pytest.approx(report.total_bytes, rel=0.01)


def test_a_choice_has_the_share_of_every_query_head() -> None:
    segments = [segment(lengths, seed) for seed, lengths in enumerate(LENGTHS)]
    queries = torch.randn(2, HEADS * GROUPS, 1, DIM, generator=torch.Generator().manual_seed(5))
    chosen = SparQPress(6, 4).selector_at(0).choose(call_of(segments, queries), group_queries(queries, HEADS))
    assert chosen is not None
    shares = torch.stack([pairs.share for pairs in chosen[0] if isinstance(pairs, Shared)])
    assert shares.shape == (2, 4, GROUPS)
    assert (shares >= 0).all()
    assert (shares.sum(0) <= 1 + 1e-6).all()


def test_errors_name_bad_arguments() -> None:
    for arguments, message in (
        ({"channels": 0}, "channels must be >= 1, got 0"),
        ({"budget": 0}, "budget must be >= 1, got 0"),
        ({"budget": 1.5}, r"a fraction in \(0, 1\), got 1.5"),
        ({"budget": 8, "n_recent": 9}, "budget must be >= 9, got 8"),
        ({"n_sink": -1}, "n_sink must be >= 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            SparQPress(**arguments)
    with pytest.raises(ValueError, match="one selector"):
        kvpress.get_press("sparq + quest:budget=64")
