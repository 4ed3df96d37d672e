# SPDX-License-Identifier: Apache-2.0
"""Signatures and behaviour of transformers that `kvpress/hf/` relies on.

A failure here names the change, before any numeric test fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    cache_utils,
    masking_utils,
    modeling_utils,
    pipelines,
)
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, get_layer_types_and_kwargs
from transformers.models.llama import modeling_llama

import kvpress
from kvpress.hf.attention import functions
from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.models import CACHE
from tests.bad_input.refusals import refused
from tests.models import tiny_model, tokens


def changed(what: str) -> str:
    return f"transformers changed {what} ({transformers.__version__}); see kvpress/hf/"


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("interface", [AttentionInterface, AttentionMaskInterface])
def test_register(interface: Any) -> None:
    name = interface.__name__
    assert parameters(interface.register) == ["key", "value"], changed(f"{name}.register")
    before = dict(interface._global_mapping)
    try:
        interface.register("signature_probe", len)
        assert interface()["signature_probe"] is len, changed(f"{name}.register: it is no longer class-wide")
    finally:
        interface._global_mapping.clear()
        interface._global_mapping.update(before)


def test_get_interface() -> None:
    lookup = modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface
    assert parameters(lookup) == ["attn_implementation", "default"], changed("ALL_ATTENTION_FUNCTIONS.get_interface")
    assert lookup("eager", len) is len, changed("get_interface: `eager` no longer gives the default")
    with pytest.raises(KeyError):
        lookup("no_such_attention", len)
    assert "sdpa" in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, changed("ALL_MASK_ATTENTION_FUNCTIONS")
    assert "eager" in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, changed("ALL_MASK_ATTENTION_FUNCTIONS")


class Spy:
    """Replaces our two functions and records the arguments from transformers."""

    def __init__(self) -> None:
        self.mask: list[dict[str, Any]] = []
        self.attention: list[dict[str, Any]] = []

    def run(self, model: Any, *args: Any, **kwargs: Any) -> None:
        def mask(*args: Any, **kwargs: Any) -> Any:
            self.mask.append({"args": args, **kwargs})
            return masking_utils.sdpa_mask(*args, **kwargs)

        def attention(*args: Any, **kwargs: Any) -> Any:
            self.attention.append({"args": args, **kwargs})
            return modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)

        AttentionInterface.register("signature_probe", attention)
        AttentionMaskInterface.register("signature_probe", mask)
        before = model.config._attn_implementation
        model.set_attn_implementation("signature_probe")
        try:
            model(*args, **kwargs)
        finally:
            model.set_attn_implementation(before)
            AttentionInterface._global_mapping.pop("signature_probe")
            AttentionMaskInterface._global_mapping.pop("signature_probe")


def test_arguments_of_the_mask_function() -> None:
    spy, padding = Spy(), torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    spy.run(tiny_model("llama"), tokens(2, 5), attention_mask=padding, use_cache=True)
    assert len(spy.mask) == 1, changed("create_causal_mask: it builds another number of masks")
    call = spy.mask[0]
    assert call["args"] == (), changed("create_causal_mask: it passes arguments by position")
    needed = {"batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "attention_mask", "config"}
    assert needed <= set(call), changed(f"create_causal_mask: {sorted(needed - set(call))} missing")
    assert call["attention_mask"].shape == (2, 5), changed("create_causal_mask: the mask is no longer the 2-D one")
    assert call["attention_mask"].dtype == torch.bool, changed("create_causal_mask: the mask is no longer boolean")
    assert parameters(functions.mask)[:5] == ["batch_size", "q_length", "kv_length", "q_offset", "kv_offset"]


def test_arguments_of_the_attention_function() -> None:
    spy = Spy()
    spy.run(tiny_model("llama"), tokens(2, 5), use_cache=True)
    assert len(spy.attention) == 3, changed("the attention interface")
    call = spy.attention[0]
    module, query, key, value, mask = call.pop("args")
    assert type(module).__name__ == "LlamaAttention", changed("the attention interface: the module comes first")
    assert module.layer_idx == 0, changed("layer_idx of attention modules")
    assert (query.shape, key.shape, value.shape) == ((2, 4, 5, 32), (2, 2, 5, 32), (2, 2, 5, 32)), changed("the layout")
    assert mask is None, changed("the mask of a batch without padding")
    assert {"scaling", "dropout"} <= set(call), changed("arguments of the attention interface")
    extra = {n for n, v in call.items() if isinstance(v, (torch.Tensor, float))} - {"scaling", "dropout"}
    assert extra <= functions.KNOWN_ATTENTION_ARGUMENTS, changed(f"the attention interface: {extra} are new")


def test_arguments_of_attention_modules() -> None:
    model, calls = tiny_model("llama"), []
    hook = model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda m, a, k: calls.append((a, k)), with_kwargs=True
    )
    try:
        model(tokens(1, 5), use_cache=True)
    finally:
        hook.remove()
    args, kwargs = calls[0]
    assert args == (), changed("decoder layers: attention is called with arguments by position")
    for name in ("hidden_states", CACHE, "position_embeddings"):
        assert name in kwargs, changed(f"decoder layers: {name} is not passed to attention")
    assert isinstance(kwargs[CACHE], Cache), changed(f"the type of {CACHE}")


@pytest.mark.parametrize("name", sorted({CACHE, "past_key_values"}))
@pytest.mark.parametrize("spec", ["knorm:0.5", "bounded(knorm:0.5):chunk=8"])
def test_a_cache_may_be_given_by_each_of_its_names(spec: str, name: str) -> None:
    """`past_key_values` is a second name of `cache` from transformers 5.24 on."""
    model, ids = tiny_model("llama"), tokens(1, 40)
    with kvpress.get_press(spec)(model) as session, torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids, **{name: cache})
        assert session.cache is cache
        assert kvpress.memory_report(cache).kept == 3 * 2 * 20
        refused(model, lambda: model.generate(ids, **{name: cache}), ValueError, "holds all 40 tokens")
        output = model.generate(tokens(1, 41), **{name: cache}, max_new_tokens=3, return_dict_in_generate=True)
        assert output[CACHE] is session.cache is cache
        assert cache.get_seq_length() == 43


def test_arguments_of_the_decoder() -> None:
    model, calls = tiny_model("llama"), []
    hook = model.get_decoder().register_forward_pre_hook(lambda m, a, k: calls.append((a, k)), with_kwargs=True)
    try:
        model(tokens(1, 5), attention_mask=torch.ones(1, 5), output_attentions=False)
        model.generate(tokens(1, 5), max_new_tokens=2)
    finally:
        hook.remove()
    for args, kwargs in calls:
        assert args == (), changed("causal language models: the decoder is called by position")
        for name in ("input_ids", "attention_mask", CACHE, "position_ids"):
            assert name in kwargs, changed(f"causal language models: {name} is not passed to the decoder")
    assert "output_attentions" in calls[0][1], changed("where output_attentions goes")


def test_cache_layers() -> None:
    abstract = {"get_mask_sizes", "get_max_length", "get_seq_length", "lazy_initialization", "update"}
    assert CacheLayerMixin.__abstractmethods__ == abstract, changed("the abstract methods of CacheLayerMixin")
    signatures = {
        "update": ["self", "key_states", "value_states", "args", "kwargs"],
        "lazy_initialization": ["self", "key_states", "value_states"],
        "get_mask_sizes": ["self", "query_length"],
        "reorder_cache": ["self", "beam_idx"],
        "offload": ["self"],
        "prefetch": ["self"],
        "reset": ["self"],
    }
    for name, expected in signatures.items():
        assert parameters(getattr(CacheLayerMixin, name)) == expected, changed(f"CacheLayerMixin.{name}")
    for name in ("crop", "batch_repeat_interleave", "batch_select_indices"):
        theirs, ours = parameters(getattr(DynamicLayer, name)), parameters(getattr(PressLayer, name))
        assert theirs == ours, changed(f"DynamicLayer.{name}")
    public = {
        n
        for n in vars(DynamicLayer) | vars(CacheLayerMixin)
        if not n.startswith("_") and callable(getattr(DynamicLayer, n))
    }
    missing = public - set(dir(PressLayer))
    assert not missing, changed(f"cache layers: {sorted(missing)} are new")
    flags = {n for n, v in vars(CacheLayerMixin).items() if isinstance(v, bool)}
    assert {"is_compileable", "is_croppable"} <= flags, changed("class flags of CacheLayerMixin")
    assert not PressLayer.is_compileable, "a compiled generate would call us with static shapes"


def test_caches() -> None:
    assert parameters(Cache.update)[:4] == ["self", "key_states", "value_states", "layer_idx"], changed("Cache.update")
    assert parameters(Cache.get_mask_sizes)[1:] == ["query_length", "layer_idx"], changed("Cache.get_mask_sizes")
    for name in ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices", "reset", "get_seq_length"):
        assert hasattr(Cache, name), changed(f"Cache.{name}")
    assert "config" in parameters(DynamicCache), changed("DynamicCache(config=)")
    config = tiny_model("gemma3_text").config
    configured = DynamicCache(config=config)
    assert configured.layer_class_to_replicate is None, changed("DynamicCache(config=): layers are made lazily")
    assert [type(layer) is DynamicLayer for layer in configured.layers] == [False, True, True], changed(
        "DynamicCache(config=)"
    )
    unconfigured = DynamicCache()
    assert unconfigured.layer_class_to_replicate is DynamicLayer, changed("DynamicCache(): layers are not made lazily")
    assert unconfigured.layers == [], changed("DynamicCache(): layers are not made lazily")
    assert "Static" in cache_utils.StaticLayer.__name__, changed("names of static layers")


def test_layer_types() -> None:
    assert parameters(get_layer_types_and_kwargs)[0] == "config", changed("get_layer_types_and_kwargs")
    layout = get_layer_types_and_kwargs(tiny_model("gemma3_text").config)
    assert len(layout) == 2, changed("get_layer_types_and_kwargs: what it returns")
    assert layout[0] == ["sliding_attention", "full_attention", "full_attention"], changed("names of layer types")
    assert get_layer_types_and_kwargs(tiny_model("llama").config)[0] == ["full_attention"] * 3, changed("layer types")


def test_models() -> None:
    model = tiny_model("llama")
    assert parameters(type(model).set_attn_implementation)[1] == "attn_implementation", changed(
        "set_attn_implementation"
    )
    assert hasattr(model.config, "_attn_implementation_internal"), changed("config._attn_implementation_internal")
    assert "decoder" in parameters(model.config.get_text_config), changed("get_text_config(decoder=)")
    assert model.get_decoder() is model.model, changed("get_decoder")
    assert hasattr(model.model, "rotary_emb"), changed("where the rotary embedding lies")
    assert parameters(modeling_llama.apply_rotary_pos_emb)[:4] == ["q", "k", "cos", "sin"], changed(
        "apply_rotary_pos_emb"
    )
    assert hasattr(modeling_llama, "eager_attention_forward"), changed("eager_attention_forward")
    assert parameters(model.model.rotary_emb.forward)[:2] == ["x", "position_ids"], changed("rotary embeddings")
    assert "dtype" in parameters(AutoModelForCausalLM.from_config) or "kwargs" in parameters(
        AutoModelForCausalLM.from_config
    ), changed("from_config(dtype=)")


def test_generate() -> None:
    model = tiny_model("llama")
    names = parameters(type(model).generate)
    assert names[:3] == ["self", "inputs", "generation_config"], changed("the first arguments of generate")
    assert "assistant_model" in names, changed("generate(assistant_model=)")
    settings = vars(GenerationConfig())
    for name in (
        "prompt_lookup_num_tokens",
        "output_attentions",
        "prefill_chunk_size",
        "cache_implementation",
        "use_cache",
    ):
        assert name in settings, changed(f"GenerationConfig.{name}")
    reads = []
    hook = model.get_decoder().register_forward_pre_hook(
        lambda m, a, k: reads.append((k["input_ids"].shape[1], k[CACHE].get_seq_length())), with_kwargs=True
    )
    try:
        model.generate(tokens(1, 9), max_new_tokens=3, do_sample=False, prefill_chunk_size=4)
    finally:
        hook.remove()
    assert reads == [(4, 0), (4, 4), (1, 8), (1, 9), (1, 10)], changed("how a prompt is read in chunks")


def test_pipelines() -> None:
    registry = pipelines.PIPELINE_REGISTRY
    assert parameters(registry.register_pipeline)[:3] == ["task", "pipeline_class", "pt_model"], changed(
        "register_pipeline"
    )
    assert parameters(registry.check_task) == ["task"], changed("check_task")
    with pytest.raises(KeyError):
        registry.check_task("no-such-task")
