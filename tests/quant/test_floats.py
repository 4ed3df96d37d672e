# SPDX-License-Identifier: Apache-2.0
"""Floating-point formats against their definitions, written out number by number."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.cache.attention import Logits
from kvpress.cache.codec import Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.quant.floats import WIDEST, FloatCodec, FloatSegment, Format

FORMATS: tuple[Format, ...] = ("fp8", "nvfp4", "mxfp4")
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
every_format = pytest.mark.parametrize("format", FORMATS)


def segment(lengths: list[int] | None = None, size: float = 1.0, seed: int = 0) -> DenseSegment:
    layout, generator = Layout(lengths or [40, 0, 24]), torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, layout.total, 64, generator=generator)
    keys[:, 3] *= 50
    return DenseSegment(size * keys, size * values, layout)


def encode(format: Format, pairs: DenseSegment, *earlier: Segment) -> FloatSegment:
    encoded = FloatCodec(format, 0).encode(pairs, Sealing(1, earlier=earlier))
    assert isinstance(encoded, FloatSegment)
    return encoded


def e4m3(x: float) -> float:
    """Nearest number of one sign, four exponent and three mantissa bits, halves to even."""
    if x == 0:
        return 0.0
    step = 2.0 ** (max(math.floor(math.log2(abs(x))), -6) - 3)
    return math.copysign(min(round(abs(x) / step) * step, 448.0), x)


def e2m1(x: float) -> float:
    return math.copysign(min(E2M1, key=lambda level: abs(level - abs(x))), x)


def expected(format: Format, row: Tensor, factor: float) -> list[float]:
    if format == "fp8":
        scale = float((row.abs().max() / 448).half())
        return [scale * e4m3(float(x) / scale) for x in row]
    numbers: list[float] = []
    for block in row.split(16 if format == "nvfp4" else 32):
        largest = float(block.abs().max())
        scale = (
            factor * e4m3(largest / factor / 6) if format == "nvfp4" else 2.0 ** (math.floor(math.log2(largest)) - 2)
        )
        numbers += [scale * e2m1(float(x) / scale) for x in block]
    return numbers


@every_format
def test_decoded_numbers_are_those_of_the_format(format: Format) -> None:
    pairs = segment()
    coded = encode(format, pairs)
    streams = pairs.layout.stream_of_row.tolist()
    for side, decoded, factors in zip(
        (pairs.keys, pairs.values), coded.read(slice(None)), (coded.key_factor, coded.value_factor), strict=True
    ):
        for r in (0, 7, 39, 40, 63):
            factor = 1.0 if factors is None else float(factors[streams[r]])
            exact = torch.tensor(expected(format, side[r], factor))
            # Divisions in another order may take the neighbour of a number that lies between two.
            assert ((decoded[r] - exact).abs() > 1e-4 * exact.abs()).sum() <= 1


@every_format
def test_codes_are_read_as_they_lie(format: Format) -> None:
    coded, q = encode(format, segment()), torch.randn(3, 4, 64)
    out, lse = coded.attend(q, Logits(0.05))
    for n in (0, 2):
        keys, values = coded.read(coded.layout.rows(n))
        logits = q[n] @ keys.T * 0.05
        torch.testing.assert_close(lse[n], logits.logsumexp(-1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(out[n], logits.softmax(-1) @ values, atol=1e-4, rtol=1e-4)


@every_format
@pytest.mark.parametrize("size", [0.0, 1e-6, 1.0, 1e4])
def test_sizes_from_nothing_to_the_largest(format: Format, size: float) -> None:
    pairs = segment(size=size)
    for side, decoded in zip((pairs.keys, pairs.values), encode(format, pairs).read(slice(None)), strict=True):
        assert torch.isfinite(decoded).all()
        assert (decoded - side).norm() <= (0.04 if format == "fp8" and size >= 1e-3 else 0.2) * side.norm()


def test_a_head_keeps_its_factor_and_later_pairs_may_be_larger() -> None:
    first = encode("nvfp4", segment())
    later = segment(size=12.0, seed=1)
    second = encode("nvfp4", later, first)
    assert second.key_factor is not None
    assert first.key_factor is not None
    assert torch.equal(second.key_factor[[0, 2]], first.key_factor[[0, 2]])
    assert (second.read(slice(None))[0] - later.keys).norm() < 0.12 * later.keys.norm()
    assert second.joinable(first)


def test_bits_per_value_are_those_of_the_format() -> None:
    for format, bits in zip(FORMATS, (8 + 16 / 64, 4.5, 4.25), strict=True):
        coded = encode(format, segment())
        sides = (coded.keys, coded.values)
        assert 8 * sum(side.codes.nbytes + side.scale.nbytes for side in sides) == bits * 2 * 64 * 64


def test_heads_that_blocks_do_not_fit_are_refused() -> None:
    from kvpress.core.model import LayerFacts

    layer = LayerFacts.__new__(LayerFacts)
    object.__setattr__(layer, "head_dim", 80)
    object.__setattr__(layer, "index", 0)
    with pytest.raises(ValueError, match="mxfp4 needs a head dim that is a multiple of 32, the model has 80"):
        kvpress.MXFP4Press().check_shape(layer)
    kvpress.NVFP4Press().check_shape(layer)


def test_rows_past_the_largest_scale_are_refused() -> None:
    largest = float(segment().keys.abs().amax(dim=1).amax())
    fits = segment(size=0.99 * WIDEST / largest)
    assert (encode("fp8", fits).read(slice(None))[0] - fits.keys).norm() <= 0.04 * fits.keys.norm()
    with pytest.raises(ValueError, match=r"up to 2.93e\+07, but these keys or values are larger; use mxfp4"):
        encode("fp8", segment(size=1.01 * WIDEST / largest))
