# SPDX-License-Identifier: Apache-2.0
"""Errors of `diffuse` before the model runs: they name the value, the allowed range and the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpress
from tests.models import fingerprint, tiny_model, tokens

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "new_tokens": ({"new_tokens": 0}, ValueError, "new_tokens must be >= 1, got 0"),
    "block_length": ({"block_length": 2.0}, TypeError, "block_length must be an integer >= 1, got 2.0"),
    "steps": ({"steps": 9}, ValueError, r"steps must be in \[1, 8\], the block_length.*got 9"),
    "both": ({"steps": 4, "threshold": 0.9}, ValueError, "steps=4 and threshold=0.9 are two schedules"),
    "threshold": ({"threshold": 1.5}, ValueError, r"threshold must be in \[0, 1\], got 1.5"),
    "temperature": ({"temperature": -1.0}, ValueError, "temperature must be >= 0, got -1.0"),
    "cache": ({"cache": "both"}, ValueError, "cache must be 'none', 'prefix' or 'dual', got 'both'"),
    "full_steps": ({"full_steps": 0}, ValueError, "full_steps must be >= 1, got 0"),
    "idle full_steps": ({"cache": "none", "full_steps": 2}, ValueError, "no effect with cache='none'"),
    "idle refresh": ({"cache": "none", "refresh_every": 2}, ValueError, "no effect with cache='none'"),
    "idle press": ({"cache": "none", "press": kvpress.KnormPress(0.5)}, ValueError, "KnormPress acts on stored pairs"),
    "press without steps": (
        {"full_steps": 8, "press": kvpress.KnormPress(0.5)}, ValueError,
        "KnormPress acts on stored pairs, which no step of a block reads: full_steps=8 must be below 8",
    ),
    "positions": (
        {"new_tokens": 10**5}, ValueError, r"100012 tokens are over the \d+ positions .* or lower new_tokens=100000",
    ),
    "no ids": ({"inputs": {"attention_mask": torch.ones(1, 12)}}, ValueError, r"must have input_ids.*\['attention_mask'\]"),
    "no press": ({"press": 0.5}, TypeError, "a press is a press object or a spec such as .*got float"),
    "mask token": ({"mask_token": 97}, ValueError, r"mask_token must be a token id in \[0, 96\], got 97"),
    "no mask token": ({"mask_token": None}, ValueError, "the configuration of LlamaForCausalLM has no mask_token_id"),
    "floats": ({"inputs": torch.ones(1, 4)}, TypeError, r"inputs must be token ids.*torch.float32 \(1, 4\)"),
    "one axis": ({"inputs": torch.ones(4).long()}, TypeError, r"inputs must be token ids.*\(4,\)"),
    "empty": ({"inputs": torch.ones(1, 0).long()}, ValueError, "at least one row and one token"),
    "ids": ({"inputs": torch.full((1, 4), 200)}, ValueError, r"inputs must be token ids in \[0, 96\], got 200"),
    "mask shape": ({"attention_mask": torch.ones(1, 3)}, ValueError, r"shape of the prompts, \(1, 12\), got \(1, 3\)"),
    "right": ({"attention_mask": torch.tensor([[1] * 11 + [0]])}, ValueError, "padded on the right"),
    "holes": ({"attention_mask": torch.tensor([[1, 0] + [1] * 10])}, ValueError, "has holes"),
    "mask twice": (
        {"inputs": {"input_ids": tokens(1, 12), "attention_mask": torch.ones(1, 12)}, "attention_mask": torch.ones(1, 12)},
        ValueError, "attention_mask is given twice",
    ),
}  # fmt: skip


def refused(model: Any, error: type[Exception], message: str, **settings: Any) -> None:
    runs: list[Any] = []
    hook, before = model.register_forward_pre_hook(lambda *args: runs.append(args)), fingerprint(model)
    settings = {"inputs": tokens(1, 12), "new_tokens": 16, "mask_token": 96, "block_length": 8, **settings}
    try:
        with pytest.raises(error, match=message):
            kvpress.diffuse(model, **settings)
    finally:
        assert fingerprint(model) == before
        hook.remove()
    assert not runs


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    settings, error, message = BAD[name]
    refused(tiny_model("llama"), error, message, **settings)


SPECS = {
    "quest:budget=16,page_size=4": "QuestPress .* chooses the pairs that tokens of a causal model read",
    "h2o:0.5": "H2OPress .* evicts during decoding",
    "kvzip:0.5": "KVzipPress .* needs all layers, or a complete prompt",
    "decoding(knorm):target_size=16": "evicts during decoding",
    "key_rerotation(knorm:0.5)": "changes the kept pairs",
    "protect(knorm:0.5):tokens=0:4": "protects spans",
    "minicache": "MiniCachePress .* encodes several layers together",
    "minference": "MInferencePress .* chooses the pairs that tokens of a causal model read",
    "fastv:0.5,layer=1,tokens=4:26": "FastVPress .* drops tokens of a prompt between the layers",
    "expected_attention:0.5": r"observes passes of a causal model \(QueryStats\)",
}


@pytest.mark.parametrize("spec", SPECS)
def test_unsuitable_presses_are_refused(spec: str) -> None:
    refused(tiny_model("llama"), NotImplementedError, SPECS[spec], press=kvpress.get_press(spec))


@pytest.mark.parametrize("name", [entry.name for entry in kvpress.list_presses() if entry.role in ("evict", "budget")])
def test_every_evicting_press_evicts_around_a_block_or_is_refused(name: str) -> None:
    (entry,) = (entry for entry in kvpress.list_presses() if entry.name == name)
    model = tiny_model("llama")
    for spec in entry.cases:
        press = kvpress.get_press(spec)
        runs: list[Any] = []
        hook = model.register_forward_pre_hook(lambda *args, runs=runs: runs.append(args))
        try:
            result = kvpress.diffuse(model, tokens(1, 64), 4, mask_token=96, block_length=4, steps=2, press=press)
        except (NotImplementedError, ValueError):
            assert not runs, f"{spec} is refused after the model has run"
            continue
        finally:
            hook.remove()
        report = kvpress.memory_report(result.cache)
        assert (report.kept < report.seen) == (not press.recipe().is_identity)


def test_unsuitable_models_are_refused() -> None:
    refused(tiny_model("qwen3_next"), NotImplementedError, "the causal mask .* has linear_attention layers")
    refused(
        tiny_model("mistral"), ValueError, "window of 8 tokens, .* prompt and new tokens are 28: keep them within 8"
    )
    refused(tiny_model("gemma3_text"), ValueError, "keep them within 8")


def test_a_model_with_an_active_press_is_refused() -> None:
    model = tiny_model("llama")
    with kvpress.KnormPress(0.5)(model), pytest.raises(RuntimeError, match="is replaced already, by a press"):
        kvpress.diffuse(model, tokens(1, 12), 8, mask_token=96)


def test_logits_that_are_not_finite_raise_an_error() -> None:
    model = tiny_model("llama")
    hook = model.lm_head.register_forward_hook(lambda module, args, output: output * float("nan"))
    try:
        with pytest.raises(FloatingPointError, match="the logits of row 0 are not finite"):
            kvpress.diffuse(model, tokens(1, 12), 8, mask_token=96)
    finally:
        hook.remove()
