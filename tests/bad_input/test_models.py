# SPDX-License-Identifier: Apache-2.0
"""Models that cannot be compressed, or only in part, and models that compute NaN or infinity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvpress
from kvpress.testing.oracle import decode_both
from tests.bad_input.refusals import forward, generate, refused
from tests.models import COMMON, fingerprint, tiny_model, tokens

BASE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def small(kind: str, auto: Any = AutoModelForCausalLM, **settings: Any) -> Any:
    torch.manual_seed(0)
    return auto.from_config(CONFIG_MAPPING[kind](**{**BASE, **settings})).eval()


def test_17_nesting() -> None:
    model = tiny_model("llama")
    before = fingerprint(model)
    with kvpress.get_press("knorm:0.5")(model):
        inside = fingerprint(model)
        with pytest.raises(RuntimeError, match=r"already active.*press_a \+ press_b"), kvpress.SnapKVPress(0.5)(model):
            pass
        assert fingerprint(model) == inside
        model.generate(tokens(1, 10), max_new_tokens=2)
    assert fingerprint(model) == before


ANY = AutoModelForCausalLM
UNSUPPORTED = [
    pytest.param("t5", AutoModelForSeq2SeqLM, {"d_kv": 8, "d_ff": 32, "num_layers": 2}, "encoder-decoder", id="19"),
    pytest.param("mamba", ANY, {}, "no full-attention layer", id="20-ssm"),
    pytest.param("mistral", ANY, {"sliding_window": 8, "num_key_value_heads": 2}, "no full-attention", id="20-sliding"),
    pytest.param("rwkv", ANY, {}, "no cache of keys and values", id="23"),
    pytest.param("xlm", ANY, {}, "no cache of keys and values", id="23-kept-to-itself"),
]


@pytest.mark.parametrize("spec", ["knorm:0.5", "kivi:bits=2", "quest:budget=16"])
@pytest.mark.parametrize(("kind", "auto", "settings", "word"), UNSUPPORTED)
def test_19_20_23_models(kind: str, auto: Any, settings: dict[str, Any], word: str, spec: str) -> None:
    model = small(kind, auto, **settings)
    press = kvpress.get_press(spec)
    refused(model, lambda: press(model).__enter__(), NotImplementedError, type(model).__name__.split("For")[0], word)


@pytest.mark.parametrize("spec", ["none", "snapkv:0.5", "turboquant", "minference"])
def test_float64_is_refused_before_a_prompt_is_read(spec: str) -> None:
    model = small("llama").double()
    press = kvpress.get_press(spec)
    refused(
        model, lambda: press(model).__enter__(), NotImplementedError, "LlamaForCausalLM", "float64", "model.float()"
    )


def test_20_without_compression_a_sliding_model_runs() -> None:
    model = tiny_model("mistral")
    assert torch.equal(generate(model, "none", tokens(1, 20)).result, model.generate(tokens(1, 20), max_new_tokens=4))


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_21_only_full_layers_are_compressed_and_named(family: str) -> None:
    model = tiny_model(family, "eager")
    report = kvpress.memory_report(generate(model, "knorm:0.5", tokens(1, 40), max_new_tokens=1).cache)
    assert [layer.compressible for layer in report.layers] == [False, True, True]
    assert [layer.kept for layer in report.layers[1:]] == [2 * 20] * 2
    lines = str(report).splitlines()
    assert sum("as is" in line for line in lines) == 1


def test_23_unknown_attention_arguments_are_refused() -> None:
    model = tiny_model("llama")
    module = model.model.layers[0].self_attn
    original = module.forward
    module.forward = lambda **kwargs: original(position_bias=torch.zeros(1, 4, 10, 10), **kwargs)
    try:
        with pytest.raises(NotImplementedError, match=r"LlamaAttention passes.*position_bias"):
            forward(model, "knorm:0.5", tokens(1, 10), use_cache=True)
    finally:
        del module.forward


@pytest.mark.parametrize("dim", [16, 80, 96, 256])
@pytest.mark.parametrize("spec", ["snapkv:0.5,window_size=4", "adakv(snapkv:0.5,window_size=4)"])
def test_24_any_head_dim(dim: int, spec: str) -> None:
    config = CONFIG_MAPPING["llama"](**{**COMMON, "head_dim": dim, "num_hidden_layers": 2})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    logits, expected, _ = decode_both(model, kvpress.get_press(spec), tokens(2, 40), None, steps=3)
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def poison(model: Any, value: float) -> Callable[[], None]:
    """Set one channel of one key of the second layer to `value` from now on; return the undo function."""

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        if output.shape[1] > 3:  # a session probes new models with one token, to see whether they rotate their keys
            output = output.clone()
            output[0, 3, 5] = value
        return output

    return model.model.layers[1].self_attn.k_proj.register_forward_hook(hook).remove


@pytest.mark.parametrize("spec", ["knorm:0.5", "kivi:bits=2,group_size=4,residual_length=0"])
def test_29_nan_is_named(spec: str) -> None:
    model = tiny_model("llama")
    undo = poison(model, float("nan"))
    try:
        with pytest.raises(FloatingPointError, match=r"NaN in keys of layer 1, row 0, head 0, token 3"):
            forward(model, spec, tokens(2, 10), use_cache=True)
    finally:
        undo()


def test_28_infinity_is_refused_by_a_codec() -> None:
    model = tiny_model("llama")
    undo = poison(model, float("inf"))
    try:
        with pytest.raises(ValueError, match="infinite"):
            forward(model, "kivi:bits=2,group_size=4,residual_length=0", tokens(2, 10), use_cache=True)
    except FloatingPointError:
        pytest.fail("infinity times zero became NaN before the codec saw it")
    finally:
        undo()
