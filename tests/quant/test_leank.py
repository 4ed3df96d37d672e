# SPDX-License-Identifier: Apache-2.0
"""Keys in the channels of a calibration: their choice, attention over them, and how their scales are learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.calibrate import LeanKSettings, calibrate
from kvpress.calibrate.leank import Scaled
from kvpress.core import calibration as calibration
from kvpress.core.calibration import Calibration
from kvpress.core.host import host
from kvpress.quant.key_channels import ThinnedSegment
from tests.folders import new_folder
from tests.models import full_layers, padded_batch, tiny_model, tokens
from tests.scales import write_scales

SINKS, RECENT, LENGTH = 3, 5, 44


def press_of(model: Any, ratio: float = 0.5, path: Path | None = None, **settings: Any) -> Any:
    path = write_scales(model, new_folder() / "scales.safetensors") if path is None else path
    return kvpress.LeanKPress(ratio, str(path), SINKS, RECENT, 8, **{"align": 4, **settings})


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "gpt_oss"])
def test_attention_is_that_over_keys_with_channels_at_zero(family: str) -> None:
    model, (ids, _) = tiny_model(family, "eager"), padded_batch([LENGTH, LENGTH])
    press, new = press_of(model), tokens(2, 3, seed=3)
    scales = calibration.read(press.calibration).tensors
    cache, stock = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with press(model), torch.no_grad():
        model(ids, past_key_values=cache)
        step_logits = [model(new[:, i : i + 1], past_key_values=cache).logits for i in range(3)]
    thinned = (LENGTH - SINKS - RECENT) // 8 * 8
    with torch.no_grad():
        model(ids, past_key_values=stock)
        for layer in full_layers(model):
            keys = stock.layers[layer].keys
            layer_scales = scales[f"{layer}.scale"]
            stays = torch.zeros_like(layer_scales).scatter_(
                1, layer_scales.topk(layer_scales.shape[1] // 2, dim=1).indices, 1.0
            )
            keys[:, :, SINKS : SINKS + thinned] *= stays[None, :, None]
        for i, logits in enumerate(step_logits):
            expected = model(new[:, i : i + 1], past_key_values=stock).logits
            torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


def test_rows_of_a_padded_batch_are_as_alone_and_bytes_are_freed() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([LENGTH, 27])
    press = press_of(model)
    with press(model) as session:
        together = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
        alone = model.generate(ids[1:, -27:], max_new_tokens=30, do_sample=False)
    assert torch.equal(together[1, LENGTH:], alone[0, 27:])
    with press(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    store = session.cache.layers[0].store
    thin = [segment for segment in store.segments if isinstance(segment, ThinnedSegment)]
    assert sum(segment.layout.total for segment in thin) > 2 * 27
    assert all(segment.keys.shape[1] == 16 for segment in thin)
    report = kvpress.memory_report(session.cache)
    assert report.total_bytes < 0.9 * report.uncompressed_bytes


def test_layers_share_out_the_channels_by_their_scales(tmp_path: Path) -> None:
    model = tiny_model("llama")
    even = calibration.read(write_scales(model, tmp_path / "even.safetensors"))
    uneven = {name: tensor * (0.01 if name.startswith("0.") else 1) for name, tensor in even.tensors.items()}
    Calibration(uneven, even.provenance).write(tmp_path / "uneven.safetensors")
    press = press_of(model, path=tmp_path / "uneven.safetensors")
    with press(model) as session, torch.no_grad():
        model(tokens(1, LENGTH), use_cache=True)
    widths = [layer.store.segments[-1].keys.shape[1] for layer in session.cache.layers]
    # 96 of 192 channels of both heads stay: layer 0 has none of the best, but stores `align` of each head.
    assert widths == [4, 24, 24]


def test_scaled_attention_is_that_of_keys_which_are_scaled_but_for_sinks_and_recent_ones() -> None:
    model, ids = tiny_model("llama", "eager"), tokens(1, LENGTH)[0]
    start = LENGTH - 4
    scale = torch.rand(3, 2, 32, generator=torch.Generator().manual_seed(1))
    attention = Scaled(scale, {0, 1, 2}, SINKS, RECENT)
    with torch.no_grad(), host().attending(model, attention):
        attention.read(model, ids)
        actual = attention.follow(model, ids[None, start:], torch.tensor([start])).logits[0]
    seen: list[Tensor] = []

    def by_hand(call: Any) -> Tensor:
        at = torch.arange(LENGTH)
        out = torch.zeros(*call.queries.shape[:3], call.values.shape[3])
        for head in range(call.queries.shape[1]):
            kv = head // (call.queries.shape[1] // 2)
            keys, query = call.keys[0, kv], call.queries[0, head]
            for t in range(LENGTH):
                unscaled = (at < SINKS) | (t - at < RECENT) | (t < start)
                mixed = torch.where(unscaled[:, None], keys, keys * scale[call.layer, kv])
                logits = (query[t] @ mixed.T) * call.logits.scale
                out[0, head, t] = logits.masked_fill(at > t, -torch.inf).softmax(0) @ call.values[0, kv]
        seen.append(out)
        return out

    with torch.no_grad(), host().attending(model, by_hand):
        expected = model(ids[None], use_cache=False).logits[0, start:]
    assert len(seen) == 3
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_channels_that_nothing_reads_lose_their_scale(tmp_path: Path) -> None:
    """Queries of one KV head are zero in half of its channels; the scales there fall, since only their cost moves them."""
    model = tiny_model("llama")
    weight = model.model.layers[1].self_attn.q_proj.weight
    original, dead = weight.detach().clone(), [*range(8), *range(16, 24)]  # rotary pairs, so that they stay zero
    with torch.no_grad():
        for head in (0, 1):
            weight[[32 * head + d for d in dead]] = 0
    try:
        settings = LeanKSettings(SINKS, RECENT, 0.01, 12, 0.05, answer=8)
        scales = calibrate(model, tokens(2, 60), settings, tmp_path / "scales.safetensors").tensors["1.scale"]
    finally:
        with torch.no_grad():
            weight.copy_(original)
    alive = [d for d in range(32) if d not in dead]
    assert float(scales[0, dead].max()) < 0.5
    assert float(scales[0, alive].mean()) > float(scales[0, dead].mean())


def test_settings(tmp_path: Path) -> None:
    press: Any = kvpress.LeanKPress(0.5)
    assert press.compression_ratio == 0.25
    with pytest.raises(AttributeError, match="it follows from ratio"):
        press.compression_ratio = 0.5
    assert kvpress.LeanKPress().recipe().is_identity
    for words, bad in {
        "no calibration file.*calibrate leank": kvpress.LeanKPress(0.5, str(tmp_path / "no.safetensors")),
        "align must be at most the head dim 32": press_of(tiny_model("llama"), align=40),
        "differs from this model": kvpress.LeanKPress(0.5),
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=words), bad(tiny_model("llama")):
            pass
