# SPDX-License-Identifier: Apache-2.0
"""Reported bytes are all bytes held, and evicted pairs are freed."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.cache.layout import Layout
from kvpress.cache.mixed import MixedSegment
from kvpress.cache.report import format_bytes
from kvpress.testing.memory import held_by_cache, held_bytes, reachable
from tests.models import padded_batch, position_ids, tiny_model, tokens
from tests.pairwise import every_pair
from tests.presses.evicting import EVICTING, exempt

KIVI = "kivi:group_size=4,residual_length=4,bits="
QUEST = "quest:budget=12,page_size=4,skip_layers=0"
DECODING = "decoding(snapkv:window_size=4):compression_interval=4,target_size=12"
PRESSES = [
    *EVICTING,
    "none",
    "streaming_llm:0.5,reindex=true",
    "h2o:0.5",
    "h2o:0.5,normalize=decay,decay=0.9",
    "kvzip:0.5,repeat_prompt=",
    "duo_attention:0.7,on_the_fly_scoring=true,sink_size=2,recent_size=6,interval=4",
    "key_rerotation(critical_adakv(snapkv:0.5,window_size=4))",
    "per_layer_compression(knorm):compression_ratios=(0.3,0.5,0.7)",
    DECODING,
    "prefill_decoding(knorm:0.5; decoding(expected_attention):compression_interval=4,target_size=12)",
    KIVI + "2",
    KIVI + "8",
    KIVI + "(4,2),sinks=3",
    "adaquant:group_size=4,residual_length=4",
    "gear:group_size=4,buffer_length=4",
    "gear_l:backbone=kcvt,buffer_length=4",
    "minicache:group_size=4",
    "minicache:bits=4,group_size=4,residual_length=4",
    "zipcache:interval=4",
    QUEST,
    "turboquant:residual_length=4",
    "rotated:residual_length=4",
    "sample(knorm:0.5)",
    "frontier:smaller=3",
    "tidal_decode:budget=12,skip_layers=0",
    f"{KIVI}4 + tidal_decode:budget=12,skip_layers=0",
    "zipcache:interval=4 + tidal_decode:budget=12,skip_layers=0",
    f"{KIVI}4 + {QUEST}",
    "adakv(snapkv:0.5,window_size=4) + sparq:budget=12",
    f"adakv(expected_attention:0.5) + {KIVI}4 + {QUEST}",
]
LEAVE_ALL = ("none", QUEST, DECODING, "tidal_decode:budget=12,skip_layers=0")
"""Presses that keep a whole prompt."""
SOME_DENSE = ("minicache:group_size=4", "minicache:bits=4,group_size=4,residual_length=4")
"""Presses that leave a whole prompt in one of three layers dense."""


def cached_layouts(cache: Any) -> int:
    """Return the bytes of lengths and offsets that layouts keep on the host: a few numbers per stream, not per pair."""
    stores = [layer.store for layer in cache.layers if hasattr(layer, "store")]
    segments = [segment for store in stores for segment in store.sealed]
    indexes = [index for owner in (*stores, *segments) for index in owner.index.values()]
    parts = [part for segment in segments if isinstance(segment, MixedSegment) for part in segment.parts]
    return sum(held_bytes(part.layout) for part in [*segments, *parts, *indexes])


def read(model: Any, press: Any, ids: Tensor, mask: Tensor | None = None, new: int = 0) -> Any:
    with press(model) as session:
        if new:
            model.generate(ids, attention_mask=mask, max_new_tokens=new + 1, do_sample=False)
        else:
            at = position_ids(mask)
            session.cache = DynamicCache(config=model.config)
            model(ids, attention_mask=mask, position_ids=at, past_key_values=session.cache)
    return session.cache


@every_pair(spec=PRESSES, padded={"even": False, "padded": True}, new={"prefill": 0, "generated": 9})
def test_the_total_is_the_held_bytes_and_positions_ascend_without_repeats(spec: str, padded: bool, new: int) -> None:
    ids, mask = padded_batch([40, 26, 13]) if padded else (tokens(3, 40), None)
    cache = read(tiny_model("llama"), kvpress.get_press(spec), ids, mask, new)
    report = kvpress.memory_report(cache)
    assert report.total_bytes == held_bytes(cache)
    assert cached_layouts(cache) <= 3 * 3 * 2 * 16 * 8
    assert report.total_bytes == sum(report.components.values()) == sum(layer.total_bytes for layer in report.layers)
    assert report.uncompressed_bytes == 3 * 3 * 2 * (40 + new) * 2 * 32 * 4
    assert report.seen == 3 * 3 * 2 * (40 + new)
    kept = [head for layer in kvpress.kept_positions(cache) for row in layer for head in row]
    assert report.kept == sum(map(len, kept))
    for at in kept:
        assert at.dtype == torch.int64
        assert bool((at.diff() > 0).all())
        assert 0 <= int(at[0]) <= int(at[-1]) < 40 + new
        assert not new or int(at[-1]) == 40 + new - 1


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_layers_that_are_not_ours_count_too(family: str) -> None:
    cache = read(tiny_model(family, "eager"), kvpress.KnormPress(0.5), tokens(2, 40))
    report = kvpress.memory_report(cache)
    assert report.total_bytes == held_by_cache(cache)
    assert [layer.compressible for layer in report.layers] == [False, True, True]


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("settings", [{}, {"prefill_chunk_size": 16}], ids=["whole", "chunked"])
def test_layers_with_a_window_hold_it_alone_after_a_prompt(family: str, settings: dict[str, Any]) -> None:
    model, press, ids = tiny_model(family, "eager"), kvpress.KnormPress(0.5), tokens(2, 40)
    plain = model.generate(ids, max_new_tokens=6, do_sample=False)
    with press(model) as session:
        model.generate(ids, max_new_tokens=1, do_sample=False, **settings)
    layer = next(layer for layer in session.cache.layers if not hasattr(layer, "store"))
    assert layer.get_seq_length() == 40
    for part in (layer.keys, layer.values):
        assert part.shape[2] == 7
        assert part.untyped_storage().nbytes() == part.numel() * 4
    report = kvpress.memory_report(session.cache).layers[list(session.cache.layers).index(layer)]
    assert report.total_bytes == report.uncompressed_bytes == 2 * layer.keys.numel() * 4
    with kvpress.NonePress()(model):
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, **settings), plain)


def test_a_report_of_a_hybrid_model_names_the_compressible_share() -> None:
    report = kvpress.memory_report(read(tiny_model("gemma3_text"), kvpress.KnormPress(0.5), tokens(1, 40)))
    part = report.shrinking
    assert [layer.layer for layer in part.layers] == [1, 2]
    assert part.compression_factor > 1.9 > report.compression_factor
    share = part.uncompressed_bytes / report.uncompressed_bytes
    assert f"2 of 3 layers can shrink, {share:.0%} of the uncompressed bytes: these are 1.98 times smaller" in str(
        report
    )


def test_a_stock_cache_is_its_own_baseline() -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    model(tokens(2, 20), past_key_values=cache)
    report = kvpress.memory_report(cache)
    assert report.total_bytes == report.uncompressed_bytes == held_bytes(cache)
    assert (report.compression_factor, report.bits_per_value) == (1.0, 32.0)
    with pytest.raises(TypeError, match="past_key_values"):
        kvpress.memory_report(None)


def test_a_report_prints_as_a_table() -> None:
    cache = read(tiny_model("llama"), kvpress.get_press(PRESSES[-1]), tokens(2, 40))
    report = kvpress.memory_report(cache)
    text = str(report)
    for word in ("codes", "scales", "dense", "uncompressed", "kept of seen", format_bytes(report.total_bytes)):
        assert word in text
    assert text.endswith(f"{report.compression_factor:.2f} times smaller, {report.bits_per_value:.2f} bits per value")
    assert max(map(len, text.splitlines())) <= 120


def test_parts_of_a_layer_are_named() -> None:
    parts = {
        "knorm:0.5": {"window", "dense", "indexes"},
        KIVI + "2": {"window", "dense", "codes", "scales", "offsets"},
        "h2o:0.5": {"window", "dense", "indexes", "scores"},
    }
    for spec, names in parts.items():
        report = kvpress.memory_report(read(tiny_model("llama"), kvpress.get_press(spec), tokens(2, 40)))
        assert set(report.components) == names


HALVES = [
    "snapkv:0.5", "knorm:0.5", "expected_attention:0.5", "adakv(expected_attention:0.5)", "adakv(snapkv:0.5)", "pyramidkv:0.5",
    "keydiff:0.5", "leverage_score:0.5,sketch_dimension=16", "non_causal_attn:0.5", "compactor:0.5,sketch_dimension=16",
    "chunk(keydiff:0.5):chunk_length=100", "chunkkv(snapkv:0.5)", "block(keydiff:0.5)", "criticalkv(snapkv:0.5)",
    "critical_adakv(snapkv:0.5)", "kvzip:0.5,repeat_prompt=", "kvzip:0.5,layerwise=true,repeat_prompt=",
    "per_layer_compression(knorm):compression_ratios=(0.3,0.5,0.7)",
]  # fmt: skip


@pytest.mark.parametrize("spec", HALVES)
def test_bytes_held_are_those_of_the_declared_budget(spec: str) -> None:
    report = kvpress.memory_report(read(tiny_model("llama"), kvpress.get_press(spec), tokens(1, 512)))
    assert abs(report.total_bytes / report.uncompressed_bytes - 0.5) <= 0.03 * 0.5
    assert 0.49 <= report.kept / report.seen <= 0.51
    assert abs(report.bits_per_value - 32 * report.total_bytes / report.uncompressed_bytes) < 1e-9
    assert report.compression_factor == report.uncompressed_bytes / report.total_bytes


@pytest.mark.parametrize(
    "spec", [s for s in PRESSES if s not in LEAVE_ALL + SOME_DENSE and not exempt(s, "pairs per layer")]
)
def test_nothing_of_the_prompt_s_size_stays(spec: str) -> None:
    model, length = tiny_model("llama"), 400
    spec = spec.replace("budget=12", "budget=100")
    cache = read(model, kvpress.get_press(spec), tokens(1, length))
    prompt_bytes = 2 * length * 32 * 4  # keys or values of one layer
    sizes = [t.untyped_storage().nbytes() for t in reachable(cache)]
    # 8-bit codes of all pairs are a quarter of one float32 tensor; half of the pairs are half of it.
    assert max(sizes) <= 0.76 * prompt_bytes
    for layer in cache.layers:
        assert layer.call is None


def test_a_press_that_evicts_frees_the_keys_that_the_model_computed() -> None:
    model = tiny_model("llama")
    gc.collect()
    before = sum(t.numel() for t in gc.get_objects() if issubclass(type(t), Tensor))
    cache = read(model, kvpress.get_press("adakv(snapkv:0.9,window_size=4)"), tokens(1, 400))
    gc.collect()
    after = sum(t.numel() for t in gc.get_objects() if issubclass(type(t), Tensor))
    assert after - before <= 2 * held_bytes(cache) // 4


@pytest.mark.parametrize("spec", ["knorm:0.5", "adakv(snapkv:0.5,window_size=4)", KIVI + "2", PRESSES[-1]])
def test_copies_share_sealed_pairs(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    cache = read(model, press, tokens(2, 400))
    copies = [copy.deepcopy(cache) for _ in range(5)]
    assert held_bytes([cache, *copies]) <= 1.15 * held_bytes(cache)
    shared = {t.untyped_storage().data_ptr() for t in reachable(cache)} & {
        t.untyped_storage().data_ptr() for t in reachable(copies[0])
    }
    sealed = [s for layer in cache.layers for s in layer.store.sealed]
    assert all(
        t.untyped_storage().data_ptr() in shared for s in sealed for group in s.storage().values() for t in group
    )
    # Layouts create the tensors of their offsets on first use.
    before = [t.clone() for t in reachable(cache, Layout)]
    with kvpress.reading(model, press):
        for n, twin in enumerate(copies):
            model(tokens(2, 9, seed=n), past_key_values=twin)
    assert all(torch.equal(a, b) for a, b in zip(before, reachable(cache, Layout), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_bits_per_value_of_kivi_in_closed_form(bits: int, dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny_model("llama")).to(dtype)
    length, group, residual, dim = 512, 32, 32, 32
    press = kvpress.KIVIPress(bits=bits, group_size=group, residual_length=residual)
    report = kvpress.memory_report(read(model, press, tokens(1, length)))
    encoded = (length - residual) // group * group
    wide = 8 * dtype.itemsize
    parameter = 32 if dtype == torch.float32 else 16
    # Keys: scale and zero point per channel and 32 tokens; values: per token and 32 channels.
    per_value = bits + 2 * parameter / group
    expected = (encoded * per_value + (length - encoded) * wide) / length
    assert dim == group
    assert report.bits_per_value == pytest.approx(expected, rel=0.01)
    assert report.components["codes"] == 3 * 2 * 2 * encoded * dim * bits // 8


def test_sizes_are_written_with_units() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 1536 * 1024, 3 * 2**30)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 MiB", "3.0 GiB",
    ]  # fmt: skip
