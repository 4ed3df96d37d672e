# SPDX-License-Identifier: Apache-2.0
"""State of a request stays with it: after failed passes, inside other requests, in copies and in other modes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import kvpress
from kvpress.hf.models import CACHE
from kvpress.hf.session.session import session
from tests.caches import STORAGES, generate, positions
from tests.models import fingerprint, tiny_model, tokens

KIVI = "kivi:bits=4,group_size=4,residual_length=4"
PRESSES = {
    **STORAGES,
    "h2o": "h2o:0.5",
    "h2o-kivi": f"h2o:0.5,interval=4 + {KIVI}",
    "decoding": "decoding(snapkv:window_size=4):compression_interval=3,target_size=12",
    "tidal": "tidal_decode:budget=12,skip_layers=0,reselect_layer=1,correction=2",
    "kvzip": "kvzip:0.5,repeat_prompt=",
    "zipcache": "zipcache:interval=4",
}


class StopError(Exception):
    """Raised on purpose."""


@contextmanager
def acting(module: nn.Module, act: Callable[[], Any]) -> Iterator[None]:
    """Call a function once, in the middle of the next pass of a module."""

    def run(*_: Any) -> None:
        handle.remove()
        act()

    handle = module.register_forward_pre_hook(run)
    yield
    handle.remove()


def stop(error: type[BaseException] = StopError) -> Any:
    raise error("stopped on purpose")


# -- passes that fail --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [StopError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["attention", "between layers"])
def test_a_pass_that_failed_leaves_nothing_for_the_next(place: str, error: type[BaseException]) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(STORAGES["composed"])
    layer = model.model.layers[1]
    plain = model(tokens(1, 9, seed=3), use_cache=False).logits
    with press(model) as opened:
        expected = generate(model, tokens(1, 20)).sequences
        cache = DynamicCache(config=model.config)
        module = layer.self_attn.o_proj if place == "attention" else layer.mlp
        with acting(module, lambda: stop(error)), pytest.raises(error):
            model(tokens(1, 30), past_key_values=cache)
        assert opened.watch is None
        assert torch.equal(model(tokens(1, 9, seed=3), use_cache=False).logits, plain)
        assert torch.equal(generate(model, tokens(1, 20)).sequences, expected)
        with pytest.raises(RuntimeError, match=r"pass that failed.*copy\.deepcopy\(cache\)"):
            model(tokens(1, 1), past_key_values=cache)
        cache.reset()
        assert torch.equal(model(tokens(1, 20), past_key_values=cache).logits[:, -1].argmax(-1), expected[:, 20])


def test_a_copy_made_before_a_pass_that_failed_goes_on() -> None:
    model, press = tiny_model("llama"), kvpress.get_press(STORAGES["composed"])
    with press(model):
        cache = model(tokens(1, 30), use_cache=True).past_key_values
        before = copy.deepcopy(cache)
        expected = model(tokens(1, 5), past_key_values=copy.deepcopy(cache)).logits
        with acting(model.model.layers[2].mlp, stop), pytest.raises(StopError):
            model(tokens(1, 5), past_key_values=cache)
        assert torch.equal(model(tokens(1, 5), past_key_values=before).logits, expected)
    with pytest.raises(RuntimeError, match="inside a press"):
        model(tokens(1, 5), past_key_values=cache)


def test_a_pass_that_failed_outside_a_press_reads_nothing_either() -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    with kvpress.NonePress()(model):
        model(tokens(1, 10), past_key_values=cache)
        with acting(model.model.layers[1].mlp, stop), pytest.raises(StopError):
            model(tokens(1, 5), past_key_values=cache)
    with pytest.raises(RuntimeError, match="pass that failed"):
        model(tokens(1, 5), past_key_values=cache)


def test_a_pass_that_fails_before_or_after_its_layers_leaves_the_cache_whole() -> None:
    model, press = tiny_model("llama"), kvpress.get_press("adakv(snapkv:0.5,window_size=4)")
    ids = tokens(1, 30)
    for place in (model.model.layers[0], model.model.norm):
        cache = DynamicCache(config=model.config)
        with press(model):
            with acting(place, stop), pytest.raises(StopError):
                model(ids, past_key_values=cache)
            if not cache.get_seq_length():
                model(ids, past_key_values=cache)
            expected = model(ids, use_cache=True).past_key_values
            assert positions(cache) == positions(expected)
            logits = [model(tokens(1, 1), past_key_values=stored).logits for stored in (cache, expected)]
            assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("spec", "target"),
    [
        ("h2o:0.5", "kvpress.observe.mass.AttentionMass.observe"),
        ("knorm:0.5", "kvpress.core.executor.Executor.after_layer"),
        ("kvzip:0.5,repeat_prompt=", "kvpress.core.executor.Executor.after_pass"),
        ("kvzip:0.5,repeat_prompt=", "kvpress.presses.repetition.RepetitionScores.take_in"),
        (KIVI, "kvpress.cache.store.KVStore.settle"),
        (STORAGES["quest"], "kvpress.sparse.quest.QuestSelector.prepare"),
    ],
)
def test_a_part_of_a_press_that_fails(spec: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    ids, before = tokens(1, 40), fingerprint(model)
    plain = model(ids, use_cache=False).logits
    with press(model):
        expected = generate(model, ids).sequences
        cache = DynamicCache(config=model.config)
        with monkeypatch.context() as patch:
            patch.setattr(target, lambda *_, **__: stop())
            with pytest.raises(StopError):
                model(ids, past_key_values=cache)
        with pytest.raises(RuntimeError, match="pass that failed"):
            model(tokens(1, 1), past_key_values=cache)
        assert torch.equal(model(ids, use_cache=False).logits, plain)
        assert torch.equal(generate(model, ids).sequences, expected)
    assert fingerprint(model) == before


# -- requests inside requests ------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", PRESSES.values(), ids=PRESSES)
def test_a_request_inside_a_pass(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    ids, inner_ids = tokens(1, 40), tokens(2, 25, seed=5)
    inside: list[Tensor] = []
    with press(model) as opened:
        expected, others = generate(model, ids), generate(model, inner_ids)
        with acting(
            model.model.layers[1].self_attn.o_proj, lambda: inside.append(generate(model, inner_ids).sequences)
        ):
            output = generate(model, ids, prefill_chunk_size=16)
        assert opened.cache is output.past_key_values
    assert torch.equal(inside[0], others.sequences)
    assert torch.equal(output.sequences, expected.sequences)
    assert positions(output.past_key_values) == positions(expected.past_key_values)


def test_the_cache_of_a_pass_inside_that_pass_is_refused() -> None:
    model, press = tiny_model("llama"), kvpress.get_press("knorm:0.5")
    cache = DynamicCache(config=model.config)
    refused = pytest.raises(RuntimeError, match="read by another forward pass")
    with press(model), acting(model.model.layers[1].mlp, lambda: model(tokens(1, 2), past_key_values=cache)), refused:
        model(tokens(1, 20), past_key_values=cache)


@pytest.mark.parametrize("chunk", [None, 8], ids=["whole", "chunks"])
def test_the_cache_of_a_request_is_not_that_of_its_negative_prompt(chunk: int | None) -> None:
    model, press = tiny_model("llama"), kvpress.get_press("knorm:0.5")
    caches: list[Any] = []

    def see(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if not any(cache is output.past_key_values for cache in caches):
            caches.append(output.past_key_values)

    settings = {"guidance_scale": 1.7, "negative_prompt_ids": tokens(1, 12, seed=4), "prefill_chunk_size": chunk}
    handle = model.register_forward_hook(see, with_kwargs=True)
    with press(model) as opened:
        result = generate(model, tokens(1, 30), **settings)
    handle.remove()
    assert opened.cache is press.last_cache is result.past_key_values
    assert [cache.get_seq_length() for cache in caches] == [30 + 7, 12 + 7]
    kept = [{n for layer in cache.layers for n in layer.store.stored()} for cache in caches]
    assert kept == [{15 + 7}, {6 + 7}]


# -- modes of torch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["window", "composed", "h2o-kivi", "decoding", "tidal", "kvzip", "zipcache"])
def test_caches_go_from_mode_to_mode(name: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(PRESSES[name])
    modes = [torch.inference_mode, torch.no_grad, torch.inference_mode, torch.inference_mode, torch.enable_grad]
    runs = []
    for order in (modes, modes[::-1], [torch.no_grad] * 5):
        logits, cache = [], DynamicCache(config=model.config)
        with press(model):
            for step, mode in enumerate(order):
                with mode():
                    if step == 3:
                        cache.batch_select_indices(torch.tensor([1, 0]))
                    lengths = (40, 6, 1, 1, 1)
                    for part in range(1 if step < 2 else 5):
                        new = tokens(2, lengths[step], seed=10 * step + part)
                        logits.append(model(new, past_key_values=cache).logits.detach().clone())
        runs.append((torch.cat(logits, dim=1), positions(cache)))
    for logits, kept in runs[:2]:
        torch.testing.assert_close(logits, runs[2][0], atol=1e-5, rtol=1e-5)
        assert kept == runs[2][1]


def test_a_cache_of_a_plain_model_in_inference_mode() -> None:
    model, press = tiny_model("llama"), kvpress.get_press(KIVI)
    sequences = []
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            cache = model(tokens(1, 20), use_cache=True).past_key_values
        with torch.no_grad(), press(model):
            sequences.append(generate(model, tokens(1, 30), past_key_values=cache, max_new_tokens=20).sequences)
    assert torch.equal(*sequences)


# -- copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", PRESSES.values(), ids=PRESSES)
def test_copies_of_a_press_do_not_carry_its_last_cache(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    with press(model):
        generate(model, tokens(1, 20))
    for twin in (copy.copy(press), copy.deepcopy(press), pickle.loads(pickle.dumps(press))):  # noqa: S301 - our own
        assert twin.last_cache is None
        assert twin == press
        assert kvpress.to_spec(twin) == kvpress.to_spec(press)
    assert press.last_cache is not None
    assert len(pickle.dumps(press)) < 4000


def test_presses_inside_a_press_do_not_carry_a_cache_either() -> None:
    model, inner = tiny_model("llama"), kvpress.SnapKVPress(0.5, window_size=4)
    with inner(model):
        generate(model, tokens(1, 20))
    assert copy.deepcopy(kvpress.AdaKVPress(inner)).press.last_cache is None


def test_a_model_that_is_pickled_inside_a_block_is_a_plain_one() -> None:
    # Use a model of its own: hidden states, once requested, leave transformers' hooks on it, which cannot be pickled.
    model, ids = tiny_model("llama", seed=257), tokens(1, 30)
    plain = generate(model, ids)
    with kvpress.get_press(STORAGES["composed"])(model):
        generate(model, ids)
        twin = pickle.loads(pickle.dumps(model))  # noqa: S301 - our own
        output = generate(twin, ids)
    assert torch.equal(output.sequences, plain.sequences)
    assert type(output.past_key_values.layers[0]) is type(plain.past_key_values.layers[0])
    assert twin.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("entire", [True, False], ids=["model", "decoder"])
def test_a_model_that_is_copied_inside_a_block_is_a_plain_one(entire: bool) -> None:
    model, press = tiny_model("qwen3"), kvpress.get_press(STORAGES["composed"])
    ids, before = tokens(1, 30), fingerprint(model)
    plain = generate(model, ids)
    with press(model) as opened:
        expected = generate(model, ids).sequences
        twin = copy.deepcopy(model) if entire else copy.deepcopy(model.model)
        assert torch.equal(generate(model, ids).sequences, expected)
        last = opened.cache
        if entire:
            output = generate(twin, ids)
            assert torch.equal(output.sequences, plain.sequences)
            assert type(output.past_key_values.layers[0]) is type(plain.past_key_values.layers[0])
            with kvpress.get_press("knorm:0.4")(twin):
                generate(twin, ids)
        else:
            assert torch.equal(model.lm_head(twin(ids)[0][:, -1]).argmax(-1), plain.sequences[:, 30])
        assert opened.cache is last
    with torch.no_grad():
        next(twin.parameters()).zero_()
    assert torch.equal(generate(model, ids).sequences, plain.sequences)
    assert fingerprint(model) == before


def test_a_model_that_is_moved_inside_a_block() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    ids, press = tokens(1, 30), kvpress.get_press(STORAGES["composed"])
    with press(model):
        cache = generate(model, ids).past_key_values
        model.to(torch.bfloat16)
        with pytest.raises(TypeError, match=r"holds torch\.float32 keys but the model brings torch\.bfloat16"):
            model(tokens(1, 1), past_key_values=cache)
        expected = generate(model, ids)
    with press(model):
        output = generate(model, ids)
    assert torch.equal(output.sequences, expected.sequences)
    assert positions(output.past_key_values) == positions(expected.past_key_values)


def test_the_attention_implementation_is_not_changed_inside_a_block() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    with kvpress.KnormPress(0.5)(model):
        model.set_attn_implementation("eager")
        with pytest.raises(RuntimeError, match="set to 'eager' inside the block"):
            model(tokens(1, 20))
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("kvpress")
    with pytest.raises(RuntimeError, match="inside `with press"):
        model(tokens(1, 20))


def test_sessions_of_the_same_settings_are_distinguished() -> None:
    model = tiny_model("llama")
    with session(kvpress.KnormPress(0.5), model):
        for press, evict in ((kvpress.KnormPress(0.6), True), (kvpress.KnormPress(0.5), False)):
            with pytest.raises(RuntimeError, match="already active"), session(press, model, evict):
                pass
        with session(kvpress.KnormPress(0.5), model):
            pass


class PagedAttentionCache:
    """Stand-in for the cache of continuous batching of transformers."""


class PagedDynamicCache(PagedAttentionCache, DynamicCache):
    """Stand-in for such a cache that is passed in the place of every other one."""


@pytest.mark.parametrize(("argument", "paged"), [("cache", PagedAttentionCache), (CACHE, PagedDynamicCache)])
@pytest.mark.parametrize("spec", ["none", "knorm:0.5"])
def test_the_cache_of_continuous_batching_is_refused(spec: str, argument: str, paged: type) -> None:
    model = tiny_model("llama")
    with (
        pytest.raises(NotImplementedError, match=r"continuous batching .*generate_batch.* call generate"),
        kvpress.get_press(spec)(model),
    ):
        model(tokens(1, 12), **{argument: paged()})
