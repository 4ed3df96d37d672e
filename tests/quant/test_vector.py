# SPDX-License-Identifier: Apache-2.0
"""VECTOR: values that are predicted from keys; which pairs lack one, what attention reads, and the bytes that are held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.cache.mixed import MixedSegment
from kvpress.core.amount import Amount
from kvpress.hf.models import with_cache
from kvpress.quant.vector import KeySegment, Routed
from kvpress.testing.memory import held_bytes
from tests.caches import positions, prefill
from tests.models import VOCAB, grow, padded_batch, position_ids, tiny_model, tokens

LENGTHS = [90, 61]


def spec(predictors: dict[str, Path], inner: str = "knorm:0.5", family: str = "llama", share: float = 1.0) -> str:
    return f"vector({inner}):share={share},calibration='{predictors[family]}'"


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of distinct tokens, padded on the left: ids, mask and positions, `[2, 90]` each."""
    ids, mask = padded_batch(LENGTHS)
    for row, length in enumerate(LENGTHS):
        ids[row, -length:] = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(row))[:length]
    at = position_ids(mask)
    assert at is not None
    return ids, mask, at


def read(model: Any, press: Any, ids: Tensor, mask: Tensor, at: Tensor) -> DynamicCache:
    """Read a padded prompt under a press; return its cache."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), press(model):
        model(ids, attention_mask=mask, position_ids=at, **with_cache(cache))
    return cache


def projections(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return keys before their rotary embedding and values of each layer for a row `[n]`, `[H, n, D]` each."""
    seen: list[tuple[Tensor, Tensor]] = []
    hooks = []
    for layer in model.model.layers:
        attention = layer.self_attn
        hooks.append(
            attention.k_proj.register_forward_hook(
                lambda module, args, keys, attention=attention: seen.append((keys[0], attention.v_proj(args[0])[0]))
            )
        )
    with torch.no_grad():
        model(ids[None])
    for hook in hooks:
        hook.remove()
    dim = model.model.layers[0].self_attn.head_dim
    return [tuple(side.unflatten(1, (-1, dim)).transpose(0, 1) for side in sides) for sides in seen]  # type: ignore[misc]


def routed(keys: Tensor, values: Tensor, weight: Tensor, offset: Tensor) -> tuple[list[int], dict[int, Tensor]]:
    """Return the pairs of a head that stay, and the predicted values of those without one, pair by pair; `[n, D]` each."""
    n = len(keys)
    b = int(n * 0.5)
    a = int(min((n - b) / 2, (b - 1) / 2))
    by_norm = sorted(range(n), key=lambda t: float(keys[t].norm()))
    pool = sorted(by_norm[: b + a])
    predictions = {t: keys[t] @ weight + offset for t in pool}
    errors = {t: float((values[t] - predictions[t]).square().sum()) for t in pool}
    lacking = sorted(pool, key=errors.__getitem__)[: 2 * a]
    return pool, {t: predictions[t] for t in lacking}


def test_pairs_are_those_of_a_plain_reference_in_each_row_of_a_padded_batch(predictors: dict[str, Path]) -> None:
    model, (ids, mask, at) = tiny_model("llama"), batch()
    tables = load_file(predictors["llama"])
    cache = read(model, kvpress.get_press(spec(predictors)), ids, mask, at)
    exact = read(model, kvpress.BasePress(), ids, mask, at)
    kept = positions(cache)
    for row, length in enumerate(LENGTHS):
        pads = max(LENGTHS) - length
        for index, (keys, values) in enumerate(projections(model, ids[row, pads:])):
            (segment,) = cache.layers[index].store.segments
            for head in range(len(keys)):
                weight, offset = (tables[f"{index}.{name}.4"][head].float() for name in ("weight", "offset"))
                pool, predicted = routed(keys[head], values[head], weight, offset)
                stored = [int(slot) - pads for slot in kept[index][row][head]]
                assert stored == pool
                stream = segment.layout.rows(row * len(keys) + head)
                lacking = segment.in_second[stream].tolist()
                assert [t for t, lacks in zip(pool, lacking, strict=True) if lacks] == sorted(predicted)
                expected = torch.stack([predicted.get(t, values[head, t]) for t in pool])
                read_keys, read_values = segment.read(torch.arange(stream.start, stream.stop))
                torch.testing.assert_close(read_values, expected, atol=1e-4, rtol=1e-4)
                slots = torch.tensor(pool) + pads
                assert torch.equal(read_keys, exact.layers[index].keys[row, head, slots])


@pytest.mark.parametrize("inner", ["knorm:0.5", "adakv(snapkv:0.6,window_size=4)", "snapkv:budget=30,window_size=4"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
def test_attention_reads_the_pairs_as_they_are_decoded(inner: str, family: str, predictors: dict[str, Path]) -> None:
    """Decoding one token at a time is attention over the decoded pairs, hidden where a head has evicted them."""
    model, (ids, mask, at) = tiny_model(family, "eager"), batch()
    cache = read(model, kvpress.get_press(spec(predictors, inner, family)), ids, mask, at)
    full = read(model, kvpress.BasePress(), ids, mask, at)
    dense, hidden = DynamicCache(config=model.config), []
    for index, layer in enumerate(cache.layers):
        keys, values = full.layers[index].keys.clone(), full.layers[index].values.clone()
        hides = torch.ones(keys.shape[:3], dtype=torch.bool)
        (segment,) = layer.store.segments
        assert isinstance(segment, MixedSegment)
        row, head = segment.layout.stream_of_row // keys.shape[1], segment.layout.stream_of_row % keys.shape[1]
        keys[row, head, segment.slots().long()], values[row, head, segment.slots().long()] = segment.read(slice(None))
        hides[row, head, segment.slots().long()] = False
        dense.update(keys, values, index)
        hidden.append(hides)
    bias = [torch.zeros(hides.shape).masked_fill(hides, -torch.inf) for hides in hidden]
    groups = model.config.num_attention_heads // model.config.num_key_value_heads

    def hide(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        blocked = bias[module.layer_idx].repeat_interleave(groups, dim=1)[:, :, None]
        grown = torch.nn.functional.pad(blocked, (0, dense.layers[module.layer_idx].keys.shape[2] + 1 - ids.shape[1]))
        return args, {**kwargs, "attention_mask": grown}

    mask_now: Tensor = mask
    for step in range(3):
        new, mask_now = tokens(2, 1, seed=20 + step), grow(mask_now, 1)
        settings = {"attention_mask": mask_now, "position_ids": position_ids(mask_now, 1)}
        with torch.no_grad(), kvpress.reading(model):
            actual = model(new, **settings, **with_cache(cache)).logits
        hooks = [layer.self_attn.register_forward_pre_hook(hide, with_kwargs=True) for layer in model.model.layers]
        with torch.no_grad():
            expected = model(new, **settings, past_key_values=dense).logits
        for hook in hooks:
            hook.remove()
        torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-3)


def test_pairs_take_the_memory_of_those_that_the_inner_press_keeps(predictors: dict[str, Path]) -> None:
    model, ids = tiny_model("llama"), tokens(2, 200)
    inner, cache = (prefill(model, kvpress.get_press(text), ids) for text in ("knorm:0.5", spec(predictors)))
    for ours, theirs in zip(cache.layers, inner.layers, strict=True):
        segment = ours.store.segments[0]
        assert sum(t.numel() for t in segment.tensors()["dense"]) == 2 * theirs.store.dense.keys.numel()
        assert set(segment.layout.lengths) == {149}
        assert segment.other.layout.lengths == (98,) * 4
    assert kvpress.memory_report(cache).total_bytes == held_bytes(cache)


def test_generated_tokens_stay_whole_until_the_next_turn(predictors: dict[str, Path]) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec(predictors))
    cache = DynamicCache(config=model.config)
    with press(model), torch.no_grad():
        model(tokens(2, 80), **with_cache(cache))
        for step in range(70):
            model(tokens(2, 1, seed=step), **with_cache(cache))
        store = cache.layers[0].store
        assert [part.layout.total for part in store.segments] == [4 * 59]
        assert store.stored() == [59 + 70] * 4
        model(tokens(2, 50, seed=99), **with_cache(cache))
    lengths = [0] * 4
    for segment in store.segments:
        lengths = [n + m for n, m in zip(lengths, segment.layout.lengths, strict=True)]
    assert lengths == store.stored() == [149] * 4
    assert all(sum(s.other.layout.lengths[n] for s in store.segments) > 70 for n in range(4))
    weights = {s.other.weight.data_ptr() for s in store.segments}
    assert len(weights) == 1
    assert kvpress.memory_report(cache).total_bytes == held_bytes(cache)


def test_a_file_holds_the_pairs_and_predicts_their_values(predictors: dict[str, Path], tmp_path: Path) -> None:
    model, (ids, mask, at) = tiny_model("llama"), batch()
    cache = read(model, kvpress.get_press(spec(predictors, "adakv(knorm:0.5)")), ids, mask, at)
    kvpress.save(cache, tmp_path / "cache.kv", model)
    loaded = kvpress.load(tmp_path / "cache.kv", model)
    assert kvpress.memory_report(loaded).total_bytes == kvpress.memory_report(cache).total_bytes
    grown = grow(mask, 4)
    settings = {"attention_mask": grown, "position_ids": position_ids(grown, 4)}
    with torch.no_grad(), kvpress.reading(model):
        first, second = (model(tokens(2, 4, seed=3), **settings, **with_cache(each)).logits for each in (cache, loaded))
    assert torch.equal(first, second)
    segment = next(s for s in loaded.layers[0].store.segments if isinstance(s, MixedSegment))
    assert isinstance(segment.other, KeySegment)


@pytest.mark.parametrize(
    ("text", "tokens_read", "kept", "lacking"),
    [
        ((0.5, 1.0), 1024, 512 + 255, 510),
        ((0.75, 1.0), 1024, 256 + 127, 254),
        ((0.25, 1.0), 1024, 768 + 128, 256),
        ((0.5, 0.5), 1024, 512 + 127, 254),
        ((0.5, 0.0), 1024, 512, 0),
        ((0.0, 1.0), 100, 100, 0),
        ((1.0, 1.0), 100, 0, 0),
        ((0.99, 1.0), 100, 1, 0),
    ],
)
def test_counts_are_those_of_the_formula(text: tuple[float, float], tokens_read: int, kept: int, lacking: int) -> None:
    amount = Routed(text[0], share=text[1])
    assert amount.of(tokens_read) == kept
    assert round(amount.dropped(tokens_read) * kept) == lacking
    exact = Amount(text[0]).of(tokens_read)
    assert kept + (kept - lacking) == 2 * exact


def test_layers_with_ratios_of_their_own_drop_shares_of_their_own(predictors: dict[str, Path]) -> None:
    model, ids = tiny_model("llama"), tokens(1, 100)
    inner = "per_layer_compression(knorm):compression_ratios=(0.25,0.5,0.9)"
    cache = prefill(model, kvpress.get_press(spec(predictors, inner)), ids)
    counts = [(s.layout.longest, s.other.layout.longest) for layer in cache.layers for s in layer.store.segments]
    assert counts == [(75 + 12, 24), (50 + 24, 48), (9 + 4, 8)]


def test_a_share_of_none_is_the_inner_press(predictors: dict[str, Path]) -> None:
    model, ids = tiny_model("llama"), tokens(1, 100)
    inner, cache = (prefill(model, kvpress.get_press(text), ids) for text in ("knorm:0.5", spec(predictors, share=0.0)))
    assert positions(inner) == positions(cache)
    for ours, theirs in zip(cache.layers, inner.layers, strict=True):
        assert torch.equal(ours.values, theirs.values)


def test_predicted_values_are_close_on_the_reference_model() -> None:
    """Values without the others of their head differ by less from the prediction than from zero, the dropped ones by half."""
    model, tokenizer = kvpress.load_model("reference", dtype=torch.float32)
    text = " The old river runs near the green hill. The code for tiger is 4837. A king and a queen waits here." * 8
    ids = tokenizer(text, return_tensors="pt").input_ids
    full = prefill(model, kvpress.BasePress(), ids)
    cache = prefill(model, kvpress.get_press("vector(snapkv:0.5)"), ids)
    for ours, theirs in zip(cache.layers, full.layers, strict=True):
        (segment,) = ours.store.segments
        rows = segment.in_second.nonzero().flatten()
        values = segment.read(rows)[1]
        exact = theirs.values[0][segment.layout.streams_of(rows), segment.slots()[rows].long()]
        assert float((values - exact).square().sum()) < 0.5 * float(exact.square().sum())


def test_a_press_around_it_is_refused() -> None:
    """It would change the number of pairs, and not the number of dropped values."""
    for text in ("per_layer_compression(vector(knorm)):compression_ratios=(0.5,0.9)", "decoding(vector(knorm))"):
        with pytest.raises(TypeError, match="such as SnapKVPress, got VectorPress"):
            kvpress.get_press(text)


def test_presses_that_change_pairs_or_evict_again_are_refused() -> None:
    for inner in ("merging(knorm:0.5)", "key_rerotation(knorm:0.5)", "refit(knorm:0.5)"):
        with pytest.raises(TypeError, match="VectorPress predicts the values of the model from its keys"):
            kvpress.get_press(f"vector({inner})")
    for inner in ("h2o:0.5", "decoding(knorm)"):
        with pytest.raises(TypeError, match="VectorPress drops values once"):
            kvpress.get_press(f"vector({inner})")
