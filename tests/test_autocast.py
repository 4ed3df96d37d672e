# SPDX-License-Identifier: Apache-2.0
"""Models in float32 that run under autocast, which computes values in 16 bits and leaves rotated keys in 32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import kvpress
from kvpress.presses.knorm import KnormPress
from tests.models import tiny_model

PRESSES = (
    "snapkv:0.5,window_size=8",
    "adakv(snapkv:0.5,window_size=8)",
    "compactor:0.5",
    "h2o:0.5",
    "frontier:smaller=4",
    "frontier:smaller=4,passes=1",
    "frontier:smaller=4,chunk=32",
    "kvgrad:0.5,repeat_prompt=",
    "refit(kvzip:0.5,repeat_prompt=):ridge=1.0",
    "kivi:bits=4,residual_length=32",
    "rotated:bits=4",
    "gear:bits=4,residual_length=32",
    "zipcache",
    "quest:budget=32,page_size=4",
    "pqcache:budget=32",
    "kivi:bits=4,residual_length=32 + quest:budget=32,page_size=4",
)


def generated(model: Any, spec: str | None, autocast: bool, grad: bool = False) -> tuple[torch.Tensor, Any]:
    """Return the logits of the last of 40 decode steps behind a prompt of 120 tokens, and the cache."""
    ids = torch.randint(1, 90, (1, 120), generator=torch.Generator().manual_seed(0))
    press = kvpress.get_press("none" if spec is None else spec)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast), press(model):
        cache = model(ids, use_cache=True).past_key_values
        for step in range(40):
            logits = model(ids[:, step : step + 1], past_key_values=cache).logits
    return logits.detach().float(), cache


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("spec", PRESSES)
def test_a_cache_under_autocast_is_as_large_as_that_of_a_model_in_16_bits(spec: str, grad: bool) -> None:
    model = tiny_model("llama")
    _, expected = generated(copy.deepcopy(model).bfloat16(), spec, autocast=False)
    logits, cache = generated(model, spec, autocast=True, grad=grad)
    assert logits.isfinite().all()
    assert [layer.store.dtype for layer in cache.layers] == [torch.bfloat16] * len(cache.layers)
    assert kvpress.memory_report(cache).total_bytes == kvpress.memory_report(expected).total_bytes


@pytest.mark.parametrize(
    "spec", ["none", "kivi:bits=8,residual_length=32", "snapkv:0.5,window_size=8", "rotated:bits=8"]
)
def test_answers_under_autocast_are_those_without_up_to_rounding(spec: str) -> None:
    model = tiny_model("llama")
    (expected, _), (logits, _) = (generated(model, spec, autocast) for autocast in (False, True))
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "phi3"])
def test_a_cache_under_autocast_is_read_as_without_a_press(family: str) -> None:
    model = tiny_model(family)
    ids = torch.randint(1, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        settings = {"max_new_tokens": 12, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        plain = model.generate(ids, **settings).logits
        with kvpress.get_press("none")(model):
            ours = model.generate(ids, **settings).logits
    scale = plain[0].float().abs().max()
    assert (torch.stack(ours[:4]).float() - torch.stack(plain[:4]).float()).abs().max() < 0.05 * scale


def test_observers_and_scorers_compute_without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    scores = KnormPress.scores

    def watched(self: Any, view: Any) -> Any:
        found.append(torch.is_autocast_enabled("cpu"))
        return scores(self, view)

    monkeypatch.setattr(KnormPress, "scores", watched)
    generated(tiny_model("llama"), "knorm:0.5", autocast=True)
    assert found
    assert not any(found)


@pytest.mark.parametrize(
    "spec", ["adakv(snapkv:0.5,window_size=8)", "kivi:bits=4,residual_length=32", "frontier:smaller=4"]
)
def test_a_padded_batch_and_a_later_turn_are_held_as_by_a_model_in_16_bits(spec: str) -> None:
    model = tiny_model("llama")
    ids = torch.randint(1, 90, (2, 160), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    caches = []
    for reader, autocast in ((copy.deepcopy(model).bfloat16(), False), (model, True)):
        press = kvpress.get_press(spec)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast), press(reader):
            cache = reader(ids[:, :120], attention_mask=mask[:, :120], use_cache=True).past_key_values
            logits = reader(ids[:, 120:], attention_mask=mask, past_key_values=cache).logits
        assert logits.isfinite().all()
        caches.append(cache)
    # Rounding of hidden states may move pairs between heads and layers that compete, and changes their number in none.
    totals = [sum(sum(layer.store.stored()) for layer in cache.layers) for cache in caches]
    assert totals[0] == totals[1]
    assert {layer.store.dtype for layer in caches[1].layers} == {torch.bfloat16}
