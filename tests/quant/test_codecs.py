# SPDX-License-Identifier: Apache-2.0
"""Properties of every codec, inside a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from benchmarks import codecs, decode
from kvpress.cache.mixed import MixedSegment
from kvpress.cache.segment import Segment
from kvpress.testing.memory import held_bytes
from tests.models import padded_batch, position_ids, tiny_model, tokens

CODECS = {
    "kivi": "kivi:bits={bits},group_size=16,residual_length=8",
    "kivi_sinks": "kivi:bits={bits},group_size=16,residual_length=8,sinks=3",
    "kivi_rotated": "kivi:bits={bits},group_size=16,residual_length=8,rotate=true",
    "saw_int4": "saw_int4:bits={bits}",
    "saw_int4_blocks": "saw_int4:bits={bits},block_size=8,group_size=16,residual_length=8,sinks=3",
    "rotated": "rotated:bits={bits},residual_length=8",
    "turboquant": "turboquant:bits={bits},residual_length=8",
    "eoptshrinkq": "eoptshrinkq:bits={bits},residual_length=8,buffer_length=16",
    "fp8": "fp8:residual_length=8",
    "nvfp4": "nvfp4:residual_length=8,sinks=3",
    "mxfp4": "mxfp4",
    "kvarn": "kvarn:bits={bits},tile_size=16,residual_length=8,sinks=3",
    "squat": "squat:bits={bits},group_size=16,residual_length=8,block_size=8",
    "adaquant": "adaquant:bits=({bits},{low}),group_size=16,residual_length=8",
    "gear": "gear:bits={bits},group_size=16,buffer_length=16,outliers=0.1",
    "gear_l": "gear_l:bits={bits},group_size=16,buffer_length=16",
    "kcvt": "gear:bits={bits},backbone=kcvt,buffer_length=16",
    "zipcache": "zipcache:bits={bits},low_bits={low},interval=10",
    "zipcache_all": "zipcache:bits={bits},low_bits={low},interval=10,probe_ratio=1.0,salient_ratio=0.3",
    "cq": "cq:bits=4,coupled=2,residual_length=8,calibration='{cq}'",
    "kvquant": "kvquant:bits=3,outliers=0.02,residual_length=8,calibration='{kvquant}'",
    "block_gtq": "block_gtq:bits={bits},residual_length=8,calibration='{block_gtq}'",
    "aquakv": "aquakv:bits=3,residual_length=8,calibration='{aquakv}'",
    "oscar": "oscar:bits={bits},residual_length=8,sinks=3,group_size=8,key_clip=1.0,value_clip=1.0,calibration='{oscar}'",
}
SPREAD = (
    *(
        "kvarn",
        "saw_int4_blocks",
        "fp8",
        "nvfp4",
        "mxfp4",
        "rotated",
        "turboquant",
        "eoptshrinkq",
        "block_gtq",
        "cq",
        "kvquant",
    ),
    *("aquakv", "oscar"),
)
"""Codecs whose error in one channel depends on other channels of the pair or on the data of a codebook."""
FAMILIES = ["llama", "qwen3", "phi3"]
Fitted = dict[str, dict[str, Path]]
"""Calibration files by family and method."""


@pytest.fixture(scope="module")
def fitted(
    books: dict[str, Path],
    levels: dict[str, Path],
    predictors: dict[str, Path],
    energies: dict[str, Path],
    rotations: dict[str, Path],
) -> Fitted:
    files_by_method = {
        "cq": books,
        "kvquant": levels,
        "aquakv": predictors,
        "block_gtq": energies,
        "oscar": rotations,
    }
    return {family: {name: files[family] for name, files in files_by_method.items()} for family in FAMILIES}


def coding() -> set[str]:
    """Return the names of all presses that store codes of single layers.

    `think` and `leank` leave channels out, and `minicache` merges layers; they have tests of their own.
    """
    quantising = {entry.name for entry in kvpress.list_presses() if entry.role == "quantise"}
    return quantising - {"think", "leank", "minicache"}


def test_every_registered_codec_is_tried() -> None:
    registered = coding()
    assert registered == {spec.partition(":")[0] for spec in CODECS.values()}


every_codec = pytest.mark.parametrize("name", CODECS)


def test_every_registered_codec_is_measured() -> None:
    registered = coding()
    timed = {spec.partition(":")[0] for spec, _ in decode.OURS.values()}
    assert registered <= timed
    assert registered == {spec.partition(":")[0] for specs in codecs.METHODS.values() for spec in specs}


def press_of(name: str, fitted: Fitted, family: str = "llama", bits: int = 4, low: int = 2) -> kvpress.BasePress:
    return kvpress.get_press(CODECS[name].format(bits=bits, low=low, **fitted[family]))


def read(press: kvpress.BasePress, ids: Tensor, mask: Tensor | None = None, family: str = "llama") -> DynamicCache:
    model = tiny_model(family)
    cache = DynamicCache(config=model.config)
    at = position_ids(mask)
    with press(model):
        model(ids, attention_mask=mask, position_ids=at, past_key_values=cache)
    return cache


def contents(segment: Segment, stream: int) -> list[Tensor]:
    return list(segment.read(segment.layout.rows(stream)))


@every_codec
def test_the_prompt_is_read_as_without_a_press(name: str, fitted: Fitted) -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([90, 41])
    expected = model(ids, attention_mask=mask).logits
    with press_of(name, fitted)(model):
        assert torch.equal(model(ids, attention_mask=mask).logits, expected)


@pytest.mark.parametrize("family", FAMILIES)
@every_codec
def test_decoding_equals_attention_over_the_decoded_pairs(name: str, family: str, fitted: Fitted) -> None:
    model = tiny_model(family)
    ids, steps = tokens(2, 75), tokens(2, 26, seed=3)
    with press_of(name, fitted, family)(model):
        cache = model(ids, use_cache=True).past_key_values
        for step in range(steps.shape[1]):
            new = steps[:, step : step + 1]
            checked = step % 12 == 0
            decoded = DynamicCache()
            for index, layer in enumerate(cache.layers if checked else []):
                decoded.update(layer.keys, layer.values, index)
            logits = model(new, past_key_values=cache).logits
            if checked:
                expected = model(new, past_key_values=decoded).logits
                # Kernels round queries to 16 bits for keys with one scale; the zeros of these are half of their range.
                tolerance = 1e-2 if name in ("rotated", "eoptshrinkq") else 2e-3
                torch.testing.assert_close(logits, expected, atol=tolerance, rtol=tolerance)
    assert all(layer.store.segments for layer in cache.layers)


@every_codec
def test_rows_do_not_influence_each_other(name: str, fitted: Fitted) -> None:
    ids, mask = padded_batch([120, 75])
    together, alone = read(press_of(name, fitted), ids, mask), read(press_of(name, fitted), ids[1:, -75:])
    # Pairs of the first layer do not depend on attention outputs.
    pairs = zip(together.layers[0].store.segments, alone.layers[0].store.segments, strict=True)
    for batch_segment, alone_segment in pairs:
        for head in range(2):
            for actual, expected in zip(contents(batch_segment, 2 + head), contents(alone_segment, head), strict=True):
                torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def later_turn(press: kvpress.BasePress, mask: Tensor, lengths: tuple[int, int], rows: slice) -> DynamicCache:
    """Read two turns of some rows; `mask [2, T]` marks their real tokens, with `lengths` columns in each turn."""
    model = tiny_model("llama")
    seen, cache = mask[rows], DynamicCache(config=model.config)
    ids = [tokens(2, length, seed=length)[rows] for length in lengths]
    if len(seen) == 1:  # without padding
        ids = [turn[:, real.bool()] for turn, real in zip(ids, seen[0].split(lengths), strict=True)]
        seen = seen[:, seen[0].bool()]
    with press(model), torch.no_grad():
        for new, end in zip(ids, (ids[0].shape[1], seen.shape[1]), strict=True):
            at = position_ids(seen[:, :end], new.shape[1])
            model(new, attention_mask=seen[:, :end], position_ids=at, past_key_values=cache)
    return cache


@pytest.mark.parametrize(("first", "second"), [(20, 30), (90, 60)])
@every_codec
def test_rows_do_not_influence_each_other_in_a_padded_later_turn(
    name: str, first: int, second: int, fitted: Fitted
) -> None:
    """The second row has padding between its turns, whose tokens are encoded together or apart."""
    lengths = (90, 120)
    mask = torch.ones(2, sum(lengths), dtype=torch.long)
    mask[1, : lengths[0] - first] = mask[1, lengths[0] : sum(lengths) - second] = 0
    press = press_of(name, fitted)
    together, alone = (later_turn(press, mask, lengths, rows) for rows in (slice(0, 2), slice(1, 2)))
    for head in range(2):
        sides = [
            zip(*(contents(segment, n) for segment in cache.layers[0].store.segments), strict=True)
            for cache, n in ((together, 2 + head), (alone, head))
        ]
        for actual, expected in zip(*sides, strict=True):
            torch.testing.assert_close(torch.cat(actual), torch.cat(expected), atol=1e-5, rtol=1e-5)
    assert any(segment.layout.lengths[2] for segment in together.layers[0].store.segments)


@pytest.mark.parametrize(
    ("name", "most"),
    [("kivi", 8 + 30), ("kvarn", 8 + 30), ("turboquant", 8 + 62), ("block_gtq", 8 + 62), ("rotated", 8 + 31)],
)
def test_as_many_pairs_stay_dense_as_documented(name: str, most: int, fitted: Fitted) -> None:
    """A prompt whose last tile lacks one pair is followed by generated tokens."""
    model, press, dense = tiny_model("llama"), press_of(name, fitted), []
    codec = press.layer_codec(0)  # type: ignore[attr-defined]
    cache = DynamicCache(config=model.config)
    with press(model), torch.no_grad():
        for length in (codec.residual + codec.sinks + 2 * codec.group - 1, *[1] * 70):
            model(tokens(1, length), past_key_values=cache)
            store = cache.layers[0].store
            dense.append(store.window.length + (0 if store.dense is None else store.dense.layout.longest))
    assert max(dense) == most


@every_codec
def test_encoded_pairs_never_change(name: str, fitted: Fitted) -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    with press_of(name, fitted)(model):
        out = model.generate(tokens(1, 60), max_new_tokens=20, min_new_tokens=20, past_key_values=cache)
        first = cache.layers[1].store.segments[0]
        before = contents(first, 0)
        model.generate(
            torch.cat([out, tokens(1, 5)], dim=1), max_new_tokens=60, min_new_tokens=60, past_key_values=cache
        )
    after = contents(cache.layers[1].store.segments[0], 0)
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[: len(old)], old)


@pytest.mark.parametrize("name", [name for name, spec in CODECS.items() if "{bits}" in spec])
def test_more_bits_are_closer(name: str, fitted: Fitted) -> None:
    model = tiny_model("llama")
    ids = tokens(2, 100)
    exact = model(ids, use_cache=True).past_key_values.layers[0].values
    errors = []
    for bits, low in ((8, 8), (4, 4), (3, 3), (2, 2), (1, 1)):
        layer = read(press_of(name, fitted, bits=bits, low=low), ids).layers[0]
        errors.append(float((layer.values - exact).square().mean()))
    assert errors == sorted(errors)
    assert errors[0] < errors[-1] / 100


@every_codec
def test_held_bytes_are_those_of_the_formula(name: str, fitted: Fitted) -> None:
    press = press_of(name, fitted)
    cache = read(press, tokens(2, 500))
    for index, layer in enumerate(cache.layers):
        codec, store = press.codec_at(index), layer.store
        sealed = sum(segment.layout.total for segment in store.segments) - 4 * codec.sinks
        parts = [part for segment in store.segments for part in segment.storage().values()]
        size = sum({t.data_ptr(): t.nbytes for part in parts for t in part}.values())
        dense = 4 * codec.sinks * 2 * 32 * 4
        shared = sum(t.nbytes for segment in store.segments for t in segment.storage().get("tables", []))
        tiles = codec.tile_bytes(sealed // 4, 32, torch.float32) + codec.fixed_bytes(32)
        expected = 4 * tiles + dense + shared
        # Indexes of blocks and bits that do not fill a byte.
        assert size == pytest.approx(expected, rel=0.02)


@every_codec
def test_eviction_comes_first_even_head_wise(name: str, fitted: Fitted) -> None:
    press = kvpress.get_press("adakv(snapkv:0.4,window_size=4)") + press_of(name, fitted)
    ids, mask = padded_batch([120, 75])
    store = read(press, ids, mask).layers[0].store
    assert sum(store.stored()) == 2 * int(120 * 0.6) + 2 * int(75 * 0.6)
    assert len(set(store.segments[-1].layout.lengths)) > 1
    dense = [contents(segment, n) for segment in store.segments for n in range(4)]
    assert all(torch.isfinite(part).all() for pair in dense for part in pair)


@every_codec
def test_constant_and_huge_values_stay_finite(name: str, fitted: Fitted) -> None:
    codec = press_of(name, fitted).codec_at(0)
    from kvpress.cache.codec import Sealing
    from kvpress.cache.layout import Layout
    from kvpress.cache.segment import DenseSegment

    rows = 80
    keys, values = torch.zeros(2 * rows, 32), torch.full((2 * rows, 32), -3.25)
    keys[:, 5] = 1e4
    values[7] = 1e3
    values[100:110] = 0
    segment = DenseSegment(keys, values, Layout([rows, rows]), first=[0, 0])
    found_keys, found_values = codec.encode(segment, Sealing(2)).read(slice(None))
    assert torch.isfinite(found_keys).all()
    assert torch.isfinite(found_values).all()
    if name not in SPREAD:
        torch.testing.assert_close(found_keys, keys, atol=1e-2, rtol=1e-3)


def test_the_salient_pairs_have_the_smaller_error(fitted: Fitted) -> None:
    ids = tokens(2, 200)
    exact = tiny_model("llama")(ids, use_cache=True).past_key_values.layers[0]
    segment = read(press_of("zipcache_all", fitted), ids).layers[0].store.segments[0]
    assert isinstance(segment, MixedSegment)
    salient = segment.in_second.view(4, -1)
    assert salient.sum(dim=1).tolist() == [60] * 4
    for decoded, expected in zip(segment.read(slice(None)), (exact.keys, exact.values), strict=True):
        error = (decoded.view(4, 200, -1) - expected.flatten(0, 1)).square().mean(-1)
        assert error[salient].mean() < error[~salient].mean() / 4


def test_the_report_counts_tables_that_layers_share_once(fitted: Fitted) -> None:
    cache = read(press_of("cq", fitted), *padded_batch([120, 75]))
    report = kvpress.memory_report(cache)
    assert report.total_bytes == held_bytes(cache)
    assert report.layers[0].components["tables"] > report.layers[1].components["tables"] > 0
