# SPDX-License-Identifier: Apache-2.0
"""Pairs in host memory: equal results, prefetch of the next layer, and alternating buffers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress import kernels
from kvpress.cache.attention import Partial, attend, group_queries
from kvpress.cache.segment_attention import options_of
from kvpress.hf.attention.queries import intercept
from kvpress.hf.session.session import session
from kvpress.observe.call import LayerCall
from kvpress.sparse.double_sparsity import DoubleSparsityPress, DoubleSparsitySelector
from kvpress.sparse.offload import HostSegment, Prefetcher
from tests.models import FAMILIES, padded_batch, tiny_model, tokens
from tests.probes import Watching
from tests.sparse.selecting import channels_file
from tests.sparse.test_tidal_decode import deep_model

LAYERS = 7
SKIPPED = 2


def press_for(budget: float, model: Any, **settings: Any) -> DoubleSparsityPress:
    return DoubleSparsityPress(
        budget, channels=8, skip_layers=SKIPPED, calibration=channels_file(model), offload=True, **settings
    )


def test_pairs_are_stored_and_reported_in_host_memory() -> None:
    model = deep_model(LAYERS)
    with press_for(0.25, model)(model) as session:
        model.generate(tokens(2, 200), max_new_tokens=4, do_sample=False)
    for number, layer in enumerate(session.cache.layers):
        assert [type(segment) for segment in layer.store.segments] == [HostSegment] * (number >= SKIPPED)
    components = kvpress.memory_report(session.cache).components
    sealed = sum(layer.store.segments[0].layout.total for layer in session.cache.layers[SKIPPED:])
    assert components["host"] == sealed * 2 * 32 * 4
    assert components["indexes"] == sealed * (8 * 4 // 8 + 2 * 4)


@pytest.mark.parametrize(("padded", "beams"), [(False, 1), (True, 3)])
def test_a_budget_of_all_pairs_is_exact(padded: bool, beams: int) -> None:
    model = deep_model(LAYERS)
    ids, mask = padded_batch([200, 140]) if padded else (tokens(2, 200), None)
    settings = {"max_new_tokens": 80, "num_beams": beams, "do_sample": False}
    expected = model.generate(ids, attention_mask=mask, **settings)
    with press_for(1000, model)(model):
        assert torch.equal(model.generate(ids, attention_mask=mask, **settings), expected)


def test_rows_of_a_padded_batch_equal_those_rows_alone() -> None:
    model = deep_model(LAYERS)
    ids, mask = padded_batch([200, 140])
    with press_for(0.2, model)(model):
        together = model.generate(ids, attention_mask=mask, max_new_tokens=80, do_sample=False)
        for row, length in enumerate((200, 140)):
            alone = model.generate(ids[row : row + 1, -length:], max_new_tokens=80, do_sample=False)
            assert torch.equal(together[row, -80:], alone[0, -80:])


def test_estimated_queries_choose_the_fetched_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate for a layer uses its weights and the input of the layer before."""
    model = deep_model(LAYERS)
    press = press_for(0.2, model)
    inputs: dict[int, LayerCall] = {}
    checked = []
    original = DoubleSparsitySelector.attend

    def checking(
        selector: DoubleSparsitySelector, call: LayerCall, queries: Tensor
    ) -> Sequence[Partial | kernels.Part]:
        is_prefetched = selector.fetching is not None and selector in selector.fetching.pending
        inputs[call.layer.index] = call
        read = original(selector, call, queries)
        options = options_of(call.logits)
        partials = [
            kernels.decode_parts(queries, [part], options) if isinstance(part, kernels.Part) else part for part in read
        ]
        assert is_prefetched == (SKIPPED < call.layer.index < LAYERS - 1)
        choosing = queries
        if is_prefetched:
            module = model.model.layers[call.layer.index].self_attn
            before = inputs[call.layer.index - 1]
            choosing = group_queries(intercept(module, before.hidden_states, before.kwargs).queries, 2)
        (chosen,) = selector.choose(call, choosing) or []
        for segment, pairs, (out, lse) in zip(call.store.segments, chosen, partials, strict=True):
            keys, values = segment.read(slice(None))
            for n in range(segment.layout.streams):
                is_read = torch.zeros(segment.layout.total, dtype=torch.bool)
                is_read[pairs.rows[n, : pairs.counts[n]].long()] = True
                expected = attend(queries[n : n + 1], keys[None], values[None], call.logits, is_read[None, None])
                torch.testing.assert_close(out[n], expected[0][0], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(lse[n], expected[1][0], atol=1e-4, rtol=1e-4)
        checked.append(call.layer.index)
        return read

    cache = DynamicCache(config=model.config)
    with press(model):
        model(tokens(2, 300), past_key_values=cache)
        monkeypatch.setattr(DoubleSparsitySelector, "attend", checking)
        for seed in range(3):
            model(tokens(2, 1, seed=seed), past_key_values=cache)
    assert checked == [*range(SKIPPED, LAYERS)] * 3


def test_a_layer_is_fetched_before_the_layer_before_attends_and_buffers_alternate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, events = deep_model(LAYERS), []
    stores: dict[int, int] = {}
    start, attend_layer = Prefetcher.start, DoubleSparsitySelector.attend

    def starting(prefetcher: Prefetcher, store: Any, choose: Any) -> Any:
        events.append(("start", stores[id(store)], prefetcher.next_buffer))
        return start(prefetcher, store, choose)

    def attending(selector: DoubleSparsitySelector, call: LayerCall, queries: Tensor) -> list[Partial]:
        events.append(("attend", call.layer.index, None))
        return attend_layer(selector, call, queries)

    cache = DynamicCache(config=model.config)
    with press_for(0.2, model)(model):
        model(tokens(1, 300), past_key_values=cache)
        stores.update({id(layer.store): number for number, layer in enumerate(cache.layers)})
        monkeypatch.setattr(Prefetcher, "start", starting)
        monkeypatch.setattr(DoubleSparsitySelector, "attend", attending)
        model(tokens(1, 1), past_key_values=cache)
    assert [(kind, layer) for kind, layer, _ in events] == [
        ("start", 3), ("attend", 2), ("start", 4), ("attend", 3), ("start", 5), ("attend", 4), ("attend", 5), ("attend", 6),
    ]  # fmt: skip
    buffers = [buffer for kind, _, buffer in events if kind == "start"]
    assert all(a != b for a, b in pairwise(buffers))


def test_a_layer_waits_for_a_slow_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gate = deep_model(LAYERS), []
    ids = tokens(1, 300)
    with press_for(0.2, model)(model):
        expected = model.generate(ids, max_new_tokens=5, do_sample=False)
        fetch = Prefetcher._fetch

        def slow(prefetcher: Prefetcher, *args: Any) -> Any:
            torch.randn(400, 400) @ torch.randn(400, 400)
            gate.append(1)
            return fetch(prefetcher, *args)

        monkeypatch.setattr(Prefetcher, "_fetch", slow)
        assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)
    assert len(gate) == 4 * 3


def test_threads_have_separate_fetches() -> None:
    model, press = deep_model(LAYERS), press_for(0.2, deep_model(LAYERS))
    prompts = [tokens(1 + n % 2, 200 + 60 * n, seed=n) for n in range(3)]

    def answer(ids: Tensor) -> Tensor:
        return model.generate(ids, max_new_tokens=12, do_sample=False)

    with press(model), ThreadPoolExecutor(3) as pool:
        expected = [answer(ids) for ids in prompts]
        assert all(map(torch.equal, pool.map(answer, prompts * 3), expected * 3))


def stop(module: Any, args: Any) -> None:
    raise RuntimeError("stop")


def test_a_failed_step_does_not_change_the_next() -> None:
    model = deep_model(LAYERS)
    failing_cache, cache = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with press_for(0.2, model)(model):
        model(tokens(1, 300), past_key_values=failing_cache)
        model(tokens(1, 200, seed=2), past_key_values=cache)
        expected = model(tokens(1, 1, seed=3), past_key_values=cache).logits
        cache.crop(-1)
        failing = model.model.layers[3].mlp.register_forward_pre_hook(stop)
        with pytest.raises(RuntimeError, match="stop"):
            model(tokens(1, 1, seed=1), past_key_values=failing_cache)
        failing.remove()
        torch.testing.assert_close(model(tokens(1, 1, seed=3), past_key_values=cache).logits, expected)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"mistral", "qwen3_next"}))
def test_computed_queries_of_a_module_are_those_of_its_attention(family: str) -> None:
    model = tiny_model(family, "eager" if family in ("gpt_oss", "gemma2") else "sdpa")
    seen = []

    def look(call: LayerCall) -> None:
        queries = call.queries
        seen.append((intercept(call.layer.module, call.hidden_states, call.kwargs).queries, queries))

    with Watching(look)(model):
        model(tokens(2, 20), use_cache=True)
    assert seen
    for computed, used in seen:
        torch.testing.assert_close(computed, used)


def test_offloading_refuses_a_codec_and_capture() -> None:
    model = deep_model(LAYERS)
    with pytest.raises(ValueError, match="one codec"):
        kvpress.get_press("kivi:bits=4") + press_for(0.2, model)
    with (
        pytest.raises(ValueError, match=r"host memory.*capture=False"),
        session(press_for(0.2, model), model, recorder=object()),
    ):  # type: ignore[arg-type]
        pass
