# SPDX-License-Identifier: Apache-2.0
"""A press leaves nothing behind on models and presses; all state of a request is in its cache."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvpress
from kvpress.cache.storage import tensors_in
from kvpress.hf.models import with_cache
from kvpress.quant.rotated import CentredCodec
from tests.caches import CODEC, STORAGES, generate, positions, prefill
from tests.models import COMMON, fingerprint, padded_batch, tiny_model, tokens
from tests.presses.evicting import EVICTING


@contextmanager
def raising_score(error: type[BaseException]) -> Iterator[Any]:
    class Broken(kvpress.ScorerPress):
        def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
            if module.layer_idx == 1:
                raise error("broken on purpose")
            return keys.norm(dim=-1)

    with pytest.raises(error, match="broken on purpose"):
        yield Broken(0.5)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_exception_while_scoring_restores_everything(family: str, error: type[BaseException]) -> None:
    model = tiny_model(family)
    before, expected = fingerprint(model), generate(model, tokens(1, 20)).sequences
    with raising_score(error) as press, press(model):
        generate(model, tokens(1, 20))
    assert fingerprint(model) == before
    assert torch.equal(generate(model, tokens(1, 20)).sequences, expected)


def test_an_exception_of_the_caller_restores_everything() -> None:
    model = tiny_model("llama")
    before = fingerprint(model)
    with pytest.raises(ZeroDivisionError), kvpress.SnapKVPress(0.5)(model):
        raise ZeroDivisionError(generate(model, tokens(1, 20)))
    assert fingerprint(model) == before
    with pytest.raises(ZeroDivisionError), kvpress.reading(model):
        raise ZeroDivisionError
    assert fingerprint(model) == before


@contextmanager
def failing(module: Any) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise OSError("failed on purpose")

    handle = module.register_forward_pre_hook(fail)
    try:
        with pytest.raises(OSError, match="failed on purpose"):
            yield
    finally:
        handle.remove()


def test_an_exception_inside_attention_leaves_no_open_call_on_the_cache() -> None:
    model = tiny_model("llama")
    press = kvpress.get_press("knorm:0.5")
    cache = prefill(model, press, tokens(1, 20))
    with failing(model.model.layers[0].self_attn.o_proj), press(model):
        model(tokens(1, 3), past_key_values=cache)
    with pytest.raises(RuntimeError, match="a forward pass that failed"):
        model(tokens(1, 3), past_key_values=cache)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("layer", [0, 2])
def test_pairs_are_not_lost_where_a_codec_fails(
    error: type[BaseException], layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer too: nothing of the pass comes after it."""
    model, encode = tiny_model("llama"), CentredCodec.encode
    cache = DynamicCache(config=model.config)
    calls: list[int] = []

    def fail(self: CentredCodec, *arguments: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == layer + 1:
            raise error("failed on purpose")
        return encode(self, *arguments)

    monkeypatch.setattr(CentredCodec, "encode", fail)
    with kvpress.get_press("rotated:bits=2,residual_length=8")(model):
        with pytest.raises(error, match="failed on purpose"):
            model(tokens(1, 40), **with_cache(cache))
        assert cache.layers[layer].store.stored() == [40, 40]
        with pytest.raises(RuntimeError, match="a forward pass that failed"):
            model(tokens(1, 1), **with_cache(cache))


def test_a_layer_that_could_not_evict_is_not_read_on() -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)

    class Broken(kvpress.ScorerPress):
        def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
            if module.layer_idx == model.config.num_hidden_layers - 1:
                raise ValueError("failed on purpose")
            return keys.norm(dim=-1)

    with Broken(0.5)(model):
        with pytest.raises(ValueError, match="failed on purpose"):
            model(tokens(1, 20), **with_cache(cache))
        with pytest.raises(RuntimeError, match="a forward pass that failed"):
            model(tokens(1, 1), **with_cache(cache))


def test_sub_configurations_get_their_own_attention_back() -> None:
    text = {
        **COMMON,
        "sliding_window": 8,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = CONFIG_MAPPING["gemma3"](text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = AutoModelForImageTextToText.from_config(
        config, attn_implementation={"text_config": "sdpa", "vision_config": "eager"}
    ).eval()
    before = fingerprint(model)
    assert len(set(before[0].values())) > 1
    ids = tokens(1, 20)
    expected = generate(model, ids).sequences
    with kvpress.get_press("none")(model):
        assert model.config.get_text_config()._attn_implementation == "kvpress"
        assert torch.equal(generate(model, ids).sequences, expected)
    assert fingerprint(model) == before
    with raising_score(ValueError) as press, press(model):
        generate(model, ids)
    assert fingerprint(model) == before


def test_a_normal_block_restores_everything() -> None:
    for family in ("llama", "qwen3_moe", "gpt_oss"):
        model = tiny_model(family, "eager")
        before = fingerprint(model)
        with kvpress.get_press(STORAGES["composed"])(model):
            assert fingerprint(model) != before
            generate(model, tokens(1, 20))
        assert fingerprint(model) == before


def test_a_subclass_of_generate_set_by_the_user_survives() -> None:
    model = tiny_model("llama", seed=3)
    original = model.generate
    model.generate = lambda *args, **kwargs: original(*args, **kwargs)
    mine = model.generate
    try:
        with kvpress.KnormPress(0.5)(model):
            generate(model, tokens(1, 12))
        assert model.__dict__.get("generate") is mine
    finally:
        model.__dict__.pop("generate", None)


def steps(model: Any, cache: Any, seed: int) -> list[Tensor]:
    """Decode four fixed tokens, as separate passes that can be interleaved."""
    return [lambda t=t: model(tokens(2, 1, seed + t), past_key_values=cache).logits for t in range(4)]


def test_two_presses_on_two_models_interleaved() -> None:
    first, second = tiny_model("llama"), tiny_model("qwen3")
    specs = (STORAGES["composed"], "knorm:0.6")
    caches = [prefill(m, kvpress.get_press(s), tokens(2, 30)) for m, s in zip((first, second), specs, strict=True)]
    expected = []
    for model, spec, cache in zip((first, second), specs, caches, strict=True):
        with kvpress.get_press(spec)(model):
            expected.append([step() for step in steps(model, copy.deepcopy(cache), 5)])
    together = [DynamicCache(config=first.config), DynamicCache(config=second.config)]
    with kvpress.get_press(specs[0])(first), kvpress.get_press(specs[1])(second):
        for model, cache in zip((first, second), together, strict=True):
            model(tokens(2, 30), past_key_values=cache)
        assert [positions(cache) for cache in together] == [positions(cache) for cache in caches]
        for i, (a, b) in enumerate(zip(steps(first, together[0], 5), steps(second, together[1], 5), strict=True)):
            assert torch.equal(a(), expected[0][i])
            assert torch.equal(b(), expected[1][i])


def test_leaving_one_of_two_models_keeps_the_other() -> None:
    first, second = tiny_model("llama"), tiny_model("llama", seed=1)
    with kvpress.KnormPress(0.5)(first):
        with kvpress.KnormPress(0.5)(second):
            pass
        with_press = generate(first, tokens(1, 20)).past_key_values
        without = generate(second, tokens(1, 20)).past_key_values
    assert kvpress.memory_report(with_press).kept < kvpress.memory_report(with_press).seen
    assert kvpress.memory_report(without).kept == kvpress.memory_report(without).seen


def test_two_models_that_share_one_configuration_take_turns() -> None:
    """transformers keeps the attention implementation in the configuration, so it cannot differ between them."""
    config = CONFIG_MAPPING["llama"](**COMMON)
    first, second = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    assert first.config is second.config
    with kvpress.KnormPress(0.5)(first):
        with pytest.raises(RuntimeError, match="shares its configuration"), kvpress.KnormPress(0.7)(second):
            pass
        assert kvpress.memory_report(first(tokens(1, 20), use_cache=True).past_key_values).kept == 3 * 2 * 10
    assert prefill(second, kvpress.KnormPress(0.5), tokens(1, 20)).get_seq_length() == 20


@pytest.mark.parametrize("spec", STORAGES.values(), ids=STORAGES)
def test_two_caches_on_one_model_interleaved(spec: str) -> None:
    model = tiny_model("llama")
    press = kvpress.get_press(spec)
    prompts = (tokens(2, 30), tokens(2, 22, seed=4))
    expected = []
    for prompt in prompts:
        cache = DynamicCache(config=model.config)
        with press(model):
            model(prompt, past_key_values=cache)
            expected.append([step() for step in steps(model, cache, 7)])
    caches = [DynamicCache(config=model.config) for _ in prompts]
    with press(model):
        for prompt, cache in zip(prompts, caches, strict=True):
            model(prompt, past_key_values=cache)
        for i, (a, b) in enumerate(zip(steps(model, caches[0], 7), steps(model, caches[1], 7), strict=True)):
            assert torch.equal(a(), expected[0][i])
            assert torch.equal(b(), expected[1][i])


@pytest.mark.parametrize(
    "spec", [*EVICTING, CODEC, STORAGES["quest"], STORAGES["composed"], "decoding(knorm):target_size=9"]
)
def test_a_press_keeps_no_state(spec: str) -> None:
    model, press, unused = tiny_model("llama"), kvpress.get_press(spec), kvpress.get_press(spec)
    with press(model):
        generate(model, *padded_batch([30, 11]))
    assert press == unused
    assert set(press.__dict__) - set(unused.__dict__) <= {"_last_cache"}
    with press(model) as session:
        again = generate(model, tokens(2, 25, seed=2)).sequences
        kept = positions(session.cache)
    with unused(model) as session:
        assert torch.equal(generate(model, tokens(2, 25, seed=2)).sequences, again)
        assert positions(session.cache) == kept


def test_last_cache() -> None:
    model, press = tiny_model("llama"), kvpress.KnormPress(0.5)
    assert press.last_cache is None
    with press(model):
        model.generate(tokens(1, 20), max_new_tokens=2)
    assert kvpress.memory_report(press.last_cache).layers[0].kept == 2 * 11


WORDS = ("kvzip", "kvgrad", "shotkv", "drop_spans", "agentkv")
"""Presses that need a tokenizer, which a tiny model does not have."""


@pytest.mark.filterwarnings("error", "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    "spec", [entry.example for entry in kvpress.list_presses() if not entry.needs and entry.name not in WORDS]
)
def test_a_model_may_be_called_with_gradients(spec: str) -> None:
    """Other tests run without gradients, as most users do; a pass with gradients works too, without a warning."""
    model = tiny_model("llama", seed=1, num_hidden_layers=4)
    ids = tokens(1, 262)
    with torch.enable_grad(), kvpress.get_press(spec)(model):
        cache = model(ids, use_cache=True).past_key_values
        logits = model(ids[:, -1:], **with_cache(cache)).logits
    assert logits.requires_grad
    assert logits.isfinite().all()
    # Encoded pairs are constants, which keep nothing of the pass in memory.
    encoded = [part for layer in cache.layers for part in layer.store.segments if part.encoded]
    assert not any(tensor.requires_grad for part in encoded for tensor in tensors_in(part.storage()))
    assert all(part.key_offset is None or not part.key_offset.centre.requires_grad for part in encoded)
