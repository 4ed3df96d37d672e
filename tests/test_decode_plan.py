# SPDX-License-Identifier: Apache-2.0
"""Decode steps repeat the packed call of a layer until its pairs are stored otherwise, with the results of a new call."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress import kernels
from kvpress.cache.attention import Logits
from kvpress.cache.decode_plan import DecodePlan
from kvpress.cache.store import KVStore
from tests.caches import prefill
from tests.kernels.compiler import needs_compiler
from tests.models import padded_batch, tiny_model, tokens

STEPS = 40
SPECS = (
    "none",
    "adakv(snapkv:0.5,window_size=4)",
    "kivi:bits=4,group_size=16,residual_length=16",
    "frontier:smaller=2",
    "decoding(knorm):compression_interval=8,target_size=40",
    "streaming_llm:0.5 + kivi:bits=2,group_size=16,residual_length=16",
)

pytestmark = needs_compiler


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the calls of operators that are checked, instead of repeated."""
    calls: list[int] = []
    original = kernels.decode_parts

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(kernels, "decode_parts", counted)
    return calls


def step(model: Any, cache: Any, token: Tensor, mask: Tensor | None = None) -> Tensor:
    logits: Tensor = model(token, past_key_values=cache, attention_mask=mask, use_cache=True).logits
    return logits


def decode(model: Any, spec: str, padded: bool) -> list[Tensor]:
    ids, mask = padded_batch([60, 41]) if padded else (tokens(2, 60), None)
    logits = []
    with torch.no_grad(), kvpress.get_press(spec)(model):
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        for index in range(STEPS):
            mask = None if mask is None else torch.cat([mask, mask.new_ones(2, 1)], dim=1)
            logits.append(step(model, cache, ids[:, index : index + 1], mask))
    return logits


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("spec", SPECS)
def test_repeated_calls_give_the_results_of_new_ones(spec: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    planned = decode(model, spec, padded)
    monkeypatch.setattr(DecodePlan, "attend", lambda *args: None)
    for with_plan, without in zip(planned, decode(model, spec, padded), strict=True):
        assert torch.equal(with_plan, without)


@pytest.mark.parametrize("padded", [False, True])
def test_most_steps_repeat_a_call(padded: bool, opened: list[int]) -> None:
    model = tiny_model("llama")
    decode(model, "none", padded)
    layers = model.config.num_hidden_layers
    growths = 1 + STEPS // 16 + 1  # a full window grows by 16 tokens
    assert 0 < len(opened) <= layers * growths


@pytest.mark.parametrize("spec", ["none", "kivi:bits=4,group_size=16,residual_length=16"])
def test_copies_read_their_own_pairs(spec: str) -> None:
    model = tiny_model("llama")
    ids = tokens(1, 60)
    with torch.no_grad(), kvpress.get_press(spec)(model):
        cache = model(ids, use_cache=True).past_key_values
        for index in range(3):
            step(model, cache, ids[:, index : index + 1])
        copied = copy.deepcopy(cache)
        alone = copy.deepcopy(cache)
        expected = step(model, alone, ids[:, 9:10]), step(model, alone, ids[:, 10:11])
        step(model, copied, ids[:, 20:21])
        first = step(model, cache, ids[:, 9:10])
        step(model, copied, ids[:, 21:22])
        assert torch.equal(first, expected[0])
        assert torch.equal(step(model, cache, ids[:, 10:11]), expected[1])


def test_a_crop_ends_the_plan() -> None:
    model = tiny_model("llama")
    ids = tokens(1, 60)
    with torch.no_grad(), kvpress.reading(model):
        cache = model(ids, use_cache=True).past_key_values
        for index in range(4):
            step(model, cache, ids[:, index : index + 1])
        cache.crop(-2)
        after = step(model, cache, ids[:, 30:31])
        fresh = model(torch.cat([ids, ids[:, :2]], dim=1), use_cache=True).past_key_values
        torch.testing.assert_close(after, step(model, fresh, ids[:, 30:31]))


def test_another_softcap_or_head_count_is_planned_anew(opened: list[int]) -> None:
    keys, values = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16)
    store = KVStore(keys, values)
    for _ in range(3):
        store.append(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16))
    queries = torch.randn(1, 4, 1, 16)
    first, _ = store.attend(queries, Logits(0.25))
    again, _ = store.attend(queries, Logits(0.25))
    assert torch.equal(first, again)
    assert len(opened) == 1
    capped, _ = store.attend(queries, Logits(0.25, 0.1))
    assert len(opened) == 2
    assert not torch.allclose(capped, first)
    more, _ = store.attend(queries.repeat(1, 2, 1, 1), Logits(0.25))
    assert len(opened) == 3
    assert more.shape == (2, 4, 16)


def test_a_planned_layer_keeps_no_evicted_segment() -> None:
    model = tiny_model("llama")
    cache = prefill(model, kvpress.get_press("snapkv:0.5,window_size=4"), tokens(1, 60))
    store = cache.layers[0].store
    gc.disable()
    try:
        with torch.no_grad(), kvpress.reading(model):
            for _ in range(2):
                step(model, cache, tokens(1, 1))
        assert store.window.cursor.plan is not None
        sealed = weakref.ref(store.sealed[0])
        store.dense = None
        assert sealed() is None
    finally:
        gc.enable()
