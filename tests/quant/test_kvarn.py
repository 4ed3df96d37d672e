# SPDX-License-Identifier: Apache-2.0
"""KVarN: balanced tiles, and the formula of the stored pairs."""

from __future__ import annotations

import torch

import kvpress
from kvpress.cache.codec import Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment
from kvpress.quant.hadamard import hadamard
from kvpress.quant.kvarn import BalancedCodec, balance
from kvpress.quant.uniform import UniformSegment
from tests.models import padded_batch, tiny_model


def spread(tile: torch.Tensor) -> float:
    """Largest over smallest deviation of columns, plus that of rows."""
    return float(sum(tile.std(dim).max() / tile.std(dim).min() for dim in (0, 1)))


def test_a_tile_that_is_a_product_is_balanced_exactly() -> None:
    torch.manual_seed(0)
    signs = 1.0 - 2 * ((torch.arange(32)[:, None] + torch.arange(64)) % 2)
    rows, columns = torch.rand(32) * 3 + 1, torch.rand(64) * 3 + 1
    tile = signs * rows[:, None] * columns
    a, b = balance(tile[None], 8)
    even = tile / a[0, :, None] / b[0]
    assert spread(tile) > 6
    assert spread(even) < 2.1


def test_balancing_never_makes_a_tile_less_even() -> None:
    torch.manual_seed(0)
    for size in (1e-3, 1.0, 1e3):
        tiles = size * torch.randn(6, 32, 16) * torch.exp2(torch.randn(6, 32, 1)) * torch.exp2(torch.randn(6, 1, 16))
        a, b = balance(tiles, 8)
        for tile, rows, columns in zip(tiles, a, b, strict=True):
            assert spread(tile / rows[:, None] / columns) <= spread(tile) * 1.001
    assert all(torch.equal(factor, torch.ones_like(factor)) for factor in balance(torch.randn(2, 8, 8), 0))
    assert all(torch.isfinite(factor).all() for factor in balance(torch.zeros(2, 8, 8), 4))


def test_decoded_pairs_equal_the_formula() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 64, 32) * torch.exp2(torch.randn(64, 1))
    segment = DenseSegment(keys, values, Layout([32, 32]))
    coded = BalancedCodec((4, 2), 16, 0, 0, 8).encode(segment, Sealing(2))
    assert isinstance(coded, UniformSegment)
    found_keys, found_values = coded.read(slice(None))
    matrix = hadamard(32, torch.device("cpu"))
    for t in range(0, 64, 16):
        y = keys[t : t + 16] @ matrix
        a = balance(y[None], 8)[0][0].half().float()[:, None]
        low, high = (y / a).amin(0), (y / a).amax(0)
        step = (high - low) / 15
        expected = (((y / a - low) / step).round() * step + low) * a @ matrix
        torch.testing.assert_close(found_keys[t : t + 16], expected, atol=1e-4, rtol=1e-3)
    for t in (0, 32):
        y = values[t : t + 32] @ matrix
        b = balance(y[None], 8)[1][0]
        low, high = (y / b).amin(1, keepdim=True), (y / b).amax(1, keepdim=True)
        step = (high - low) / 3
        expected = (((y / b - low) / step).round() * step + low) * b @ matrix
        torch.testing.assert_close(found_values[t : t + 32], expected, atol=1e-4, rtol=1e-3)


def test_a_loud_token_costs_the_others_nothing() -> None:
    torch.manual_seed(0)
    keys = torch.randn(128, 64)
    loud = keys.clone()
    loud[5] *= 100
    others = [t for t in range(128) if t != 5]

    def error(codec: kvpress.cache.codec.Codec, side: torch.Tensor) -> float:
        decoded = codec.encode(DenseSegment(side, side, Layout([128])), Sealing(1)).read(slice(None))[0]
        return float((decoded - side)[others].square().mean())

    codec, plain = BalancedCodec((2, 2), 128, 0, 0, 8), BalancedCodec((2, 2), 128, 0, 0, 0)
    assert error(codec, loud) < 3 * error(codec, keys)
    assert error(plain, loud) > 5 * error(codec, loud)


def test_the_first_pairs_stay_as_they_are() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([90, 60])
    exact = model(ids, attention_mask=mask, use_cache=True).past_key_values.layers[0].keys
    with kvpress.get_press("kvarn:tile_size=16,sinks=8")(model) as session:
        model(ids, attention_mask=mask)
    store = session.cache.layers[0].store
    assert list(store.segments[0].layout.lengths) == [8] * 4
    assert torch.equal(store.segments[0].read(slice(0, 8))[0], exact[0, 0, :8])
