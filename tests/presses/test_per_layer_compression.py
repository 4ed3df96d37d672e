# SPDX-License-Identifier: Apache-2.0
"""Layers that keep different shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvpress
from kvpress import KnormPress, PerLayerCompressionPress
from kvpress.testing.oracle import decode_both
from tests.caches import positions, prefill
from tests.models import full_layers, padded_batch, tiny_model, tokens

RATIOS = {"llama": (0.2, 0.75, 0.5), "gemma3_text": (0.25, 0.8)}


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("inner", ["snapkv:window_size=4", "adakv(snapkv:window_size=4)", "pyramidkv:window_size=4"])
@pytest.mark.parametrize("family", RATIOS)
def test_every_layer_keeps_its_own_share(family: str, inner: str, padded: bool) -> None:
    model = tiny_model(family)
    lengths = [40, 26] if padded else [40, 40]
    ids, mask = padded_batch(lengths) if padded else (tokens(2, 40), None)
    press = PerLayerCompressionPress(kvpress.get_press(inner), RATIOS[family])
    actual, expected, cache = decode_both(model, press, ids, mask)
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)
    for layer, ratio in zip(full_layers(model), RATIOS[family], strict=True):
        for row, length in zip(kvpress.kept_positions(cache)[layer], lengths, strict=True):
            assert sum(int((head < 40).sum()) for head in row) == 2 * int(length * (1 - ratio))
    assert press == PerLayerCompressionPress(kvpress.get_press(inner), RATIOS[family])


def test_each_layer_keeps_the_pairs_of_the_press_at_its_ratio() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([40, 26])

    def kept(press: Any, chunk: int | None = None) -> list[Any]:
        with press(model) as session:
            model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, prefill_chunk_size=chunk)
        return positions(session.cache)

    press = PerLayerCompressionPress(kvpress.TOVAPress(0.1), RATIOS["llama"])
    assert kept(press)[0] == kept(kvpress.TOVAPress(0.2))[0]
    assert kept(press, chunk=7) == kept(press)


def test_later_turns_of_several_tokens() -> None:
    model, press = tiny_model("llama"), PerLayerCompressionPress(KnormPress(), RATIOS["llama"])
    cache = prefill(model, press, tokens(2, 40))
    with press(model):
        model(tokens(2, 20, seed=1), past_key_values=cache)
    assert [layer.store.stored() for layer in cache.layers] == [[n] * 4 for n in (48, 15, 30)]


def test_presses_that_act_in_decoding_do() -> None:
    model, press = tiny_model("llama"), PerLayerCompressionPress(kvpress.H2OPress(), RATIOS["llama"])
    with press(model) as session:
        model.generate(tokens(1, 40), max_new_tokens=8, do_sample=False)
    assert [layer.store.stored() for layer in session.cache.layers] == [[n] * 2 for n in (32, 10, 20)]


@pytest.mark.parametrize(("family", "layers"), [("llama", 3), ("gemma3_text", 2)])
def test_one_ratio_per_compressed_layer(family: str, layers: int) -> None:
    press = PerLayerCompressionPress(KnormPress(), [0.5] * 4)
    with pytest.raises(ValueError, match=f"4 ratios but .* has {layers} layers"), press(tiny_model(family)):
        pass


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((KnormPress(), [0.5, 1.5]), ValueError, r"compression_ratios\[1\] must be in \[0, 1\], got 1.5"),
        ((KnormPress(), ["x"]), TypeError, r"compression_ratios\[0\] must be a number"),
        ((KnormPress(), []), ValueError, "one ratio per layer, got none"),
        ((KnormPress(budget=5), [0.5]), ValueError, "no budget, got budget=5, beside compression_ratios"),
        (
            (kvpress.NonePress(), [0.5]),
            TypeError,
            "needs a press that scores pairs, such as SnapKVPress, got NonePress",
        ),
        (
            (kvpress.DecodingPress(KnormPress()), [0.5]),
            TypeError,
            "DecodingPress keeps a target .* compression_ratios would have no effect",
        ),
    ],
)
def test_bad_configurations(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PerLayerCompressionPress(*arguments)


def test_a_target_while_decoding_leaves_nothing_to_set() -> None:
    with pytest.raises(TypeError, match="DecodingPress sets the number of pairs by its target"):
        kvpress.DecodingPress(PerLayerCompressionPress(KnormPress(), [0.5]))


@pytest.mark.parametrize("inner", [KnormPress(), kvpress.SnapKVPress(window_size=4), kvpress.AdaKVPress(KnormPress())])
@pytest.mark.parametrize("suffix", ["none", "kivi:bits=4,group_size=4,residual_length=4", "quest:budget=8,page_size=4"])
def test_a_ratio_of_one_leaves_nothing_of_the_prompt(inner: Any, suffix: str) -> None:
    model = tiny_model("llama")
    press = PerLayerCompressionPress(inner, [0.1, 1, 1.0]) + kvpress.get_press(suffix)
    with press(model) as session:
        model.generate(tokens(2, 20), max_new_tokens=9, do_sample=False)
    assert [sum(layer.store.stored()) for layer in session.cache.layers] == [4 * 26, 4 * 8, 4 * 8]
    with press(model) as session:
        model(tokens(1, 20), use_cache=True)
    assert kvpress.memory_report(session.cache).kept == 2 * 18


def test_the_mean_over_layers_is_planned() -> None:
    press = PerLayerCompressionPress(KnormPress(), [0.2, 0.4, 0.9])
    assert press.recipe().kept(100) == 50
    assert press.compression_ratio == pytest.approx(0.5)
    assert press.recipe().kept(5) == round((4 + 3 + 1) / 3)
    assert kvpress.get_press(kvpress.to_spec(press)) == press
