# SPDX-License-Identifier: Apache-2.0
"""ZipCache: which pairs count as salient, and how their values are scaled."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import DynamicCache

import kvpress
from kvpress.cache.codec import Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment
from kvpress.hf.models import with_cache
from kvpress.observe.observer import hashed
from kvpress.quant.zipcache import ZipCacheCodec, top_per_stream
from tests.models import full_layers, padded_batch, position_ids, tiny_model, tokens


class Watching(kvpress.ZipCachePress):
    """Press that records saliency and encodes nothing."""

    def codec_at(self, layer: int) -> None:
        return None


def saliency(ids: torch.Tensor, mask: torch.Tensor | None, share: float, family: str = "llama") -> list[torch.Tensor]:
    model = tiny_model(family, "eager")
    cache = DynamicCache(config=model.config)
    at = position_ids(mask)
    with Watching(probe_ratio=share)(model):
        model(ids, attention_mask=mask, position_ids=at, past_key_values=cache)
    side = cache.layers[0].store.window.side
    return [side["saliency"], side["probes"]]


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_all_probes_give_the_normalised_column_sums_of_the_model(family: str) -> None:
    ids = tokens(2, 40)
    sums, probes = saliency(ids, None, 1.0, family)
    attention = tiny_model(family, "eager")(ids, output_attentions=True).attentions[0]
    torch.testing.assert_close(sums, attention.unflatten(1, (2, 2)).sum(dim=(2, 3)), atol=1e-4, rtol=1e-4)
    assert torch.equal(probes, (40 - torch.arange(40.0)).expand(2, 2, 40))


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_generated_tokens_are_probes_of_all_that_they_see(
    family: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    model = tiny_model(family, "eager")
    layer = full_layers(model)[0]
    ids, mask = padded_batch([43, 31])
    output = model(ids, attention_mask=mask, position_ids=position_ids(mask), output_attentions=True)
    cache = DynamicCache(config=model.config)
    with Watching(probe_ratio=1.0)(model):
        for span in (slice(0, 40), slice(40, 41), slice(41, 42), slice(42, 43)):
            real = mask[:, : span.stop]
            at = position_ids(real)[:, span]
            model(ids[:, span], attention_mask=real, position_ids=at, **with_cache(cache))
    side = cache.layers[layer].store.window.side
    paid = output.attentions[layer].unflatten(1, (2, 2)).sum(dim=2) * mask[:, None, :, None]
    torch.testing.assert_close(side["saliency"], paid.sum(dim=2), atol=1e-4, rtol=1e-4)
    later = mask.flip(1).cumsum(dim=1).flip(1) * mask
    assert torch.equal(side["probes"], later[:, None].expand(2, 2, 43).float())


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("tokens_at_once", [1, 2])
def test_probes_see_how_much_a_pair_counts(tokens_at_once: int, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    model, ids = tiny_model("llama", "eager"), tokens(1, 32)
    received = []
    for copies in (1, 3):
        cache = DynamicCache(config=model.config)
        with Watching(probe_ratio=1.0)(model):
            model(ids[:, :30], **with_cache(cache))
            window = cache.layers[0].store.window
            before = window.side["saliency"]
            window.weigh(torch.zeros(1, 2, 30).index_fill_(2, torch.tensor([7]), math.log(copies)))
            model(ids[:, 30 : 30 + tokens_at_once], **with_cache(cache))
        received.append(cache.layers[0].store.window.side["saliency"][..., :30] - before)
    plain, heavy = received[0] / tokens_at_once, received[1] / tokens_at_once
    assert (heavy[..., 7] > 2 * plain[..., 7]).all()  # three times as much of a slightly larger sum
    assert (heavy.sum(dim=-1) < 2 + 1e-5).all()  # the group's two heads share out one each


def test_ten_per_cent_of_the_queries_are_probes_half_of_them_the_newest() -> None:
    ids = tokens(1, 400)
    _, probes = saliency(ids, None, 0.1)
    per_pair = probes[0, 0]
    is_probe = per_pair - torch.cat([per_pair[1:], torch.zeros(1)])
    assert is_probe[-20:].tolist() == [1.0] * 20
    assert 10 <= int(is_probe[:-20].sum()) <= 32
    assert set(is_probe.tolist()) == {0.0, 1.0}


def test_probes_do_not_depend_on_the_batch() -> None:
    ids, mask = padded_batch([90, 41])
    together = saliency(ids, mask, 0.1)
    alone = saliency(ids[1:, -41:], None, 0.1)
    for actual, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(actual[1:, :, -41:], expected, atol=1e-5, rtol=1e-4)
        assert not actual[1, :, :-41].any()


def test_hashes_spread_evenly() -> None:
    hashes = hashed(torch.arange(20000))
    assert torch.histc(hashes, 10, 0, 1).sub(2000).abs().max() < 200


def test_the_most_salient_of_every_stream_are_marked() -> None:
    layout = Layout([5, 0, 4])
    scores = torch.tensor([3.0, 1, 4, 1, 5, 2, 2, 2, 2])
    assert top_per_stream(scores, layout, (2, 0, 2)).int().tolist() == [0, 0, 1, 0, 1, 0, 0, 1, 1]
    assert top_per_stream(scores, layout, (1, 0, 3)).int().tolist() == [0, 0, 0, 0, 1, 0, 1, 1, 1]
    assert not top_per_stream(scores, layout, (0, 0, 0)).any()
    assert top_per_stream(scores, layout, (5, 0, 4)).all()


def encode(values: torch.Tensor, low: int = 2) -> torch.Tensor:
    segment = DenseSegment(values.clone(), values, Layout([len(values)]), first=[0])
    codec = ZipCacheCodec((4, 4), (low, low), 0.5, 10, 0)
    return codec.encode(segment, Sealing(1)).read(slice(None))[1]


def test_a_loud_channel_leaves_the_relative_error_of_the_others() -> None:
    values = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    loud = values.clone()
    loud[:, 3] *= 100
    quiet = [channel for channel in range(32) if channel != 3]

    def relative(x: torch.Tensor) -> float:
        return float((encode(x, 4) - x)[:, quiet].norm() / x[:, quiet].norm())

    # A tenth of the range after scaling by square roots; one scale per token would give all of it.
    assert relative(loud) < 12 * relative(values)
    plain = loud.amax(1, keepdim=True) - loud.amin(1, keepdim=True)
    step = plain / 15
    tokenwise = torch.round(loud / step) * step
    assert relative(loud) < 0.25 * float((tokenwise - loud)[:, quiet].norm() / loud[:, quiet].norm())


def test_generated_tokens_keep_the_channel_scales_of_the_prompt() -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    with kvpress.ZipCachePress(interval=10)(model):
        model.generate(tokens(2, 30), max_new_tokens=60, min_new_tokens=60, past_key_values=cache)
    (segment,) = {id(s): s for s in cache.layers[0].store.segments[:1]}.values()
    prompt = model(tokens(2, 30), use_cache=True).past_key_values.layers[0].values
    expected = prompt.abs().amax(dim=2).sqrt().flatten(0, 1)
    for part in segment.parts:
        torch.testing.assert_close(part.channel_scale, expected)
    assert segment.layout.longest > 30


def test_weights_in_16_bits_are_kept_through_turns() -> None:
    """Splitting and joining classes leaves the log-weights of pairs unchanged."""
    model, cache = tiny_model("llama"), DynamicCache(config=tiny_model("llama").config)
    press = kvpress.get_press(
        "sample(knorm:budget=30):share=1.0 + zipcache:bits=2,probe_ratio=0.25,interval=4,residual_length=8"
    )
    with press(model):
        for turn in range(3):
            model(tokens(2, 40, seed=turn), past_key_values=cache)
            parts = [part for layer in cache.layers for part in layer.store.sealed if part.log_weight is not None]
            assert parts
            assert {part.log_weight.dtype for part in parts} == {torch.float16}
