# SPDX-License-Identifier: Apache-2.0
"""KVQuant: fitted levels, ranges of channels before their rotary embedding, and outliers that are kept exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.cache.codec import Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.rotation import Rotation
from kvpress.cache.segment import DenseSegment
from kvpress.calibrate import LevelSettings, calibrate
from kvpress.core import calibration as calibration
from kvpress.quant.codebook import CodedSegment
from kvpress.quant.kvquant import LevelCodec, centre_and_reach
from tests.caches import prefill
from tests.models import padded_batch, tiny_model, tokens
from tests.quant.test_codebook import embedding

HEADS, DIM, ROWS = 2, 32, 64


def pairs(seed: int = 0) -> DenseSegment:
    keys, values = torch.randn(2, HEADS * ROWS, DIM, generator=torch.Generator().manual_seed(seed))
    keys[:, 3] += 20
    keys[5, 7], values[70, 9] = 30.0, -25.0
    return DenseSegment(keys, values, Layout([ROWS] * HEADS), first=[0] * HEADS)


def codec(bits: int = 3, outliers: float = 0.0, **changes: Tensor) -> LevelCodec:
    """Ranges of each head's pairs, and even levels."""
    keys = pairs().keys.view(HEADS, ROWS, DIM)
    even = torch.linspace(-1, 1, 2**bits)
    return replace(
        LevelCodec(*centre_and_reach(keys.amin(1), keys.amax(1)), even, even, (bits, bits), outliers, 0), **changes
    )


def encode(coder: LevelCodec, segment: DenseSegment, turned: bool = False) -> CodedSegment:
    rotation = Rotation(lambda at: embedding()(at), "full", "Attention") if turned else None
    encoded = coder.encode(segment, Sealing(HEADS, seen=256, rotation=rotation))
    assert isinstance(encoded, CodedSegment)
    encoded.describe(segment, without=())
    return encoded


def test_even_levels_are_a_uniform_quantiser() -> None:
    segment = pairs()
    keys, values = encode(codec(), segment).read(slice(None))
    sides = segment.keys.view(HEADS, ROWS, DIM)
    low, step = sides.amin(1, keepdim=True), (sides.amax(1, keepdim=True) - sides.amin(1, keepdim=True)) / 7
    expected = ((sides - low) / step).round() * step + low
    torch.testing.assert_close(keys.view_as(sides), expected, atol=0.02, rtol=1e-3)  # books have 16 bits
    largest = segment.values.abs().amax(1, keepdim=True)
    expected = (((segment.values / largest + 1) * 3.5).round() / 3.5 - 1) * largest
    assert ((values - expected).abs() > 0.01 * largest).float().mean() < 0.01  # a scale of 16 bits moves a few edges


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("share", [0.01, 0.05, 1.0])
def test_a_fixed_share_of_each_tile_is_exact(share: float, turned: bool) -> None:
    segment = pairs()
    encoded = encode(codec(outliers=share), segment, turned)
    expected = segment.keys
    if turned:
        assert encoded.rotation is not None
        expected = encoded.rotation.unrotate(segment)
    all_rows, head = torch.arange(HEADS * ROWS), segment.layout.stream_of_row
    for side, exact in ((encoded.keys, expected), (encoded.values, segment.values)):
        assert side.residual is not None
        assert side.residual.outliers is not None
        counts = side.residual.outliers.counts.view(-1, 32).sum(1, dtype=torch.int64)
        assert counts.tolist() == [round(share * 32 * DIM)] * 4
        error = (side.read(all_rows, head) - exact).abs()
        row = all_rows.repeat_interleave(side.residual.outliers.counts.long())
        assert error[row, side.residual.channel.long()].max() < 1e-5
    if not turned:  # the loudest numbers are among them
        read = encoded.read(slice(None))
        assert abs(float(read[0][5, 7]) - 30) < 1e-5
        assert abs(float(read[1][70, 9]) + 25) < 1e-5
    if share == 1:
        torch.testing.assert_close(encoded.read(slice(None))[0], segment.keys, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fisher", [False, True])
def test_levels_are_ascending_and_weighted(fisher: bool, tmp_path: Path) -> None:
    model, out = tiny_model("llama"), tmp_path / "levels.safetensors"
    calibration = calibrate(model, tokens(2, 80), LevelSettings(fisher=fisher, iterations=20), out)
    exact = model(tokens(2, 80)[:1], use_cache=True).past_key_values.layers[1]
    for bits in (2, 3, 4):
        for side in ("keys", "values"):
            level = calibration.tensors[f"1.{side}.{bits}"]
            assert (level.diff() >= 0).all()
            assert level.abs().max() <= 1.01
    assert calibration.tensors["1.low"].shape == exact.keys.shape[1::2]
    assert (calibration.tensors["1.high"] > calibration.tensors["1.low"]).all()


def test_fitted_levels_beat_even_ones_on_the_reference_model() -> None:
    model, tokenizer = kvpress.load_model("reference", dtype=torch.float32)
    text = " The old river runs near the green hill. The code for tiger is 4837. A king and a queen waits here." * 8
    ids = tokenizer(text, return_tensors="pt").input_ids
    exact = model(ids, use_cache=True).past_key_values
    tensors = calibration.read(calibration.shipped("kvquant")).tensors
    error = {}
    for spec in (
        "kvquant:bits=3",
        "kvquant:bits=3,outliers=0",
        "kvquant:bits=2",
        "kivi:bits=2,residual_length=0,sinks=4",
    ):
        with torch.no_grad(), kvpress.get_press(spec)(model):
            cache = model(ids, use_cache=True).past_key_values
        layers = zip(cache.layers, exact.layers, strict=True)
        error[spec] = sum(float((a.keys - b.keys).square().sum() / b.keys.square().sum()) for a, b in layers)
    assert error["kvquant:bits=3"] < error["kvquant:bits=3,outliers=0"] < error["kvquant:bits=2"]
    assert error["kvquant:bits=2"] < error["kivi:bits=2,residual_length=0,sinks=4"]
    assert len(tensors) == 4 * 8


def test_one_file_serves_all_widths_and_lists_of_layers(levels: dict[str, Path]) -> None:
    ids, mask = padded_batch([120, 75])
    sizes = []
    for bits in ("2", "4", "((4,2),2,(4,3))"):
        cache = prefill(
            tiny_model("llama"), kvpress.get_press(f"kvquant:bits={bits},calibration='{levels['llama']}'"), ids, mask
        )
        codes = [[t for s in layer.store.segments for t in s.storage().get("codes", [])] for layer in cache.layers]
        sizes.append([sum(t.nbytes for t in parts) for parts in codes])
    two, four, mixed = sizes
    assert [b / a for a, b in zip(two, four, strict=True)] == [2, 2, 2]
    assert mixed == [1.5 * two[0], two[1], 1.75 * two[2]]


def test_missing_foreign_and_unsuitable_files_are_refused(levels: dict[str, Path], tmp_path: Path) -> None:
    model = tiny_model("llama")
    for spec, error, message in (
        ("kvquant", ValueError, "kvquant.safetensors was made for .*differs from this model in layers 4 .here 3."),
        (
            f"kvquant:calibration='{tmp_path / 'no'}'",
            FileNotFoundError,
            "kvpress calibrate kvquant .* --out .*no",
        ),
        (f"kvquant:calibration='{levels['qwen3']}'", ValueError, "architecture 'Qwen3ForCausalLM'"),
    ):
        with pytest.raises(error, match=message), kvpress.get_press(spec)(model):
            pytest.fail("the press was installed")
    with pytest.raises(ValueError, match=r"bits must be one of \[2, 3, 4\]"):
        kvpress.get_press("kvquant:bits=8")
    with pytest.raises(ValueError, match="outliers must be"):
        kvpress.get_press("kvquant:outliers=1.5")
