# SPDX-License-Identifier: Apache-2.0
"""Caches of other models, batches or kinds, caches without a mask, and calls without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvpress
from tests.bad_input.refusals import forward, generate, read_first, refused
from tests.models import COMMON, padded_batch, tiny_model, tokens


def test_13_new_ids_without_the_mask_of_the_whole_sequence() -> None:
    model = tiny_model("llama")
    cache = read_first(model)
    words = ["input_ids has 4 tokens", "seen 10", "attention_mask=torch.ones(batch, 10 + 4)"]
    for mask in (None, torch.ones(2, 4, dtype=torch.long)):
        run = lambda m=mask: generate(model, "knorm:0.5", tokens(2, 4), past_key_values=cache, attention_mask=m)  # noqa: E731
        refused(model, run, ValueError, *words)
    assert cache.get_seq_length() == 10


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("spec", ["none", "knorm:0.5", "kivi:bits=4,group_size=4,residual_length=4"])
def test_13_padded_rows_without_their_mask(spec: str, new: int) -> None:
    """Their padding would be read as tokens."""
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    ids, mask = padded_batch([20, 11])
    forward(model, spec, ids, attention_mask=mask, past_key_values=cache)
    words = ["begin with padding", f"pass attention_mask [batch, {20 + new}]"]
    refused(model, lambda: forward(model, spec, tokens(2, new), past_key_values=cache), ValueError, *words)
    mask = torch.cat([mask, mask.new_ones(2, new)], dim=1)
    forward(model, spec, tokens(2, new), attention_mask=mask, past_key_values=cache)


def test_14_nothing_new() -> None:
    model = tiny_model("llama")
    cache = read_first(model)
    for mask in (None, torch.ones(2, 10, dtype=torch.long)):
        run = lambda m=mask: generate(model, "knorm:0.5", tokens(2, 10), past_key_values=cache, attention_mask=m)  # noqa: E731
        refused(model, run, ValueError, "all 10 tokens", "at least one new token")


@pytest.mark.parametrize("chunk", [None, 3])
def test_14_new_ids_may_be_as_many_as_the_cache_holds(chunk: int | None) -> None:
    model = tiny_model("llama")
    new, mask = tokens(2, 10, seed=8), torch.ones(2, 20, dtype=torch.long)
    full_ids = torch.cat([tokens(2, 10), new], dim=1)
    stock = model.generate(full_ids, max_new_tokens=4, do_sample=False)
    cache = DynamicCache(config=model.config)
    with kvpress.get_press("none")(model):
        model(tokens(2, 10), past_key_values=cache)
    session = generate(
        model,
        "none",
        new,
        past_key_values=cache,
        attention_mask=mask,
        **({"prefill_chunk_size": chunk} if chunk else {}),
    )
    assert torch.equal(session.result[:, -4:], stock[:, -4:])


def other_models() -> list[Any]:
    def llama(**settings: Any) -> Any:
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**{**COMMON, **settings})).eval()

    return [
        pytest.param(llama, {"head_dim": 16}, ["2 kv heads of dimension 16", "2 of dimension 32"], id="dim"),
        pytest.param(
            llama, {"num_key_value_heads": 4}, ["4 kv heads of dimension 32", "2 of dimension 32"], id="heads"
        ),
        pytest.param(llama, {"num_hidden_layers": 2}, ["2 layers", "3"], id="fewer-layers"),
        pytest.param(llama, {"num_hidden_layers": 4}, ["4 layers", "3"], id="more-layers"),
    ]


@pytest.mark.parametrize("configured", [True, False], ids=["config", "bare"])
@pytest.mark.parametrize("inside", [True, False], ids=["press", "stock"])
@pytest.mark.parametrize(("make", "settings", "words"), other_models())
def test_15_cache_of_another_model(make: Any, settings: dict, words: list[str], inside: bool, configured: bool) -> None:
    model, current = tiny_model("llama"), make(**settings)
    cache = DynamicCache(config=current.config) if configured else DynamicCache()
    if inside:
        with kvpress.get_press("knorm:0.5")(current):
            current(tokens(2, 10), past_key_values=cache)
    else:
        current(tokens(2, 10), past_key_values=cache)
    refused(model, lambda: forward(model, "knorm:0.5", tokens(2, 4), past_key_values=cache), ValueError, *words)


def test_15_cache_of_another_batch() -> None:
    model = tiny_model("llama")
    cache = read_first(model, batch=3)
    run = lambda: forward(model, "knorm:0.5", tokens(2, 4), past_key_values=cache)  # noqa: E731
    with pytest.raises(ValueError, match=r"\(3, 2, '\*', 32\).*\(2, 2, 4, 32\).*one cache per model and batch"):
        run()
    assert cache.get_seq_length() == 10


def test_16_a_compressed_cache_is_not_read_without_a_press() -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    with kvpress.get_press("adakv(knorm:0.5)")(model):
        model(tokens(2, 10), past_key_values=cache)
    with pytest.raises(RuntimeError, match=r"with press\(model\).*kvpress\.reading\(model\)"):
        model(tokens(2, 4), past_key_values=cache)
    with kvpress.get_press("knorm:0.5")(model):
        model(tokens(2, 4), past_key_values=cache)
    assert cache.get_seq_length() == 14


def test_37_static_cache_with_ours_is_the_library_s_error() -> None:
    model = tiny_model("llama")
    settings = {"cache_implementation": "static", "past_key_values": DynamicCache(config=model.config)}
    with pytest.raises(ValueError, match="Passing both `cache_implementation`") as stock:
        model.generate(tokens(1, 10), max_new_tokens=4, **settings)
    refused(model, lambda: generate(model, "knorm:0.5", tokens(1, 10), **settings), ValueError, str(stock.value))


@pytest.mark.parametrize("name", ["static", "quantized", "offloaded_static"])
def test_37_other_caches(name: str) -> None:
    model = tiny_model("llama")
    run = lambda: generate(model, "knorm:0.5", tokens(1, 10), cache_implementation=name)  # noqa: E731
    refused(model, run, NotImplementedError, f"cache_implementation={name!r}", "dynamic cache")


def test_37_a_static_cache_object() -> None:
    from transformers import StaticCache

    model = tiny_model("llama")
    cache = StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(NotImplementedError, match=r"Static.*fixed size.*dynamic cache"):
        generate(model, "knorm:0.5", tokens(1, 10), past_key_values=cache)


def test_no_cache() -> None:
    model = tiny_model("llama")
    for settings in ({"use_cache": False}, {"generation_config": GenerationConfig(use_cache=False)}):
        run = lambda s=settings: generate(model, "knorm:0.5", tokens(1, 10), **s)  # noqa: E731
        refused(model, run, ValueError, "use_cache=False")
