# SPDX-License-Identifier: Apache-2.0
"""GEAR: error that the low-rank part and the outliers remove."""

from __future__ import annotations

import pytest
import torch

import kvpress
from kvpress.cache.codec import Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment
from kvpress.quant.gear import GEARCodec, extremes, low_rank
from kvpress.quant.uniform import UniformCodec, UniformSegment
from tests.models import tiny_model


def pairs(rows: int = 64, dim: int = 32, streams: int = 3, seed: int = 0) -> DenseSegment:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(streams * rows, dim, generator=generator) for _ in range(2))
    return DenseSegment(keys, values, Layout([rows] * streams), first=[0] * streams)


def encode(
    segment: DenseSegment, *, bits: int = 2, channels: int | None = 16, rank: int = 4, outliers: float = 0.0
) -> UniformSegment:
    codec = GEARCodec(bits, bits, channels, rank, 2, outliers, 3, 16, 0)
    encoded = codec.encode(segment, Sealing(segment.layout.streams))
    assert isinstance(encoded, UniformSegment)
    return encoded


def error(encoded: UniformSegment, expected: DenseSegment) -> float:
    sides = zip(encoded.read(slice(None)), (expected.keys, expected.values), strict=True)
    return sum(float((a - b).square().mean()) for a, b in sides)


def test_without_corrections_it_is_its_backbone() -> None:
    segment = pairs()
    plain = UniformCodec(2, 2, (16, 1), (1, 16), 16, 0).encode(segment, Sealing(3))
    for actual, expected in zip(encode(segment, rank=0).read(slice(None)), plain.read(slice(None)), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("channels", [16, None])
def test_full_rank_or_all_outliers_are_exact(channels: int | None) -> None:
    segment = pairs(rows=16, dim=16)
    for settings in ({"rank": 16}, {"outliers": 1.0, "rank": 0}, {"outliers": 1.0, "rank": 2}):
        assert error(encode(segment, bits=1, channels=channels, **settings), segment) < 1e-10


def test_error_falls_with_rank_and_outliers() -> None:
    segment = pairs()
    by_rank = [error(encode(segment, rank=rank), segment) for rank in (0, 1, 2, 4, 8, 16)]
    by_outliers = [error(encode(segment, rank=0, outliers=share), segment) for share in (0.0, 0.1, 0.3, 0.6, 1.0)]
    assert by_rank == sorted(by_rank, reverse=True)
    assert by_outliers == sorted(by_outliers, reverse=True)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_power_iteration_is_close_to_the_best_rank(rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    decaying = torch.randn(100, 24, generator=generator) @ torch.diag(0.8 ** torch.arange(24.0))
    factor, basis = low_rank(decaying, rank, passes=3)
    best = torch.linalg.svdvals(decaying)[rank:].square().sum().sqrt()
    assert float((decaying - factor @ basis).norm()) <= 1.05 * float(best)
    torch.testing.assert_close(factor.T @ factor, torch.eye(rank), atol=1e-5, rtol=0)


def test_extremes_are_the_largest_and_smallest_of_every_vector() -> None:
    x = torch.randn(40, 30, generator=torch.Generator().manual_seed(0))
    marked = extremes(x, 0.2, axis=0)
    assert marked.sum(dim=0).tolist() == [8] * 30
    order = x.argsort(dim=0)
    assert marked.gather(0, order)[:4].all()
    assert marked.gather(0, order)[-4:].all()


def test_every_row_of_a_batch_has_a_basis_of_its_own() -> None:
    segment = pairs()
    together = encode(segment, outliers=0.1)
    for n in range(3):
        rows = segment.layout.rows(n)
        alone = DenseSegment(segment.keys[rows], segment.values[rows], Layout([64]), first=[0])
        for actual, expected in zip(together.read(rows), encode(alone, outliers=0.1).read(slice(None)), strict=True):
            assert torch.equal(actual, expected)


def test_streams_shorter_than_the_rank_are_encoded_beside_longer_ones() -> None:
    segment = pairs(rows=16, streams=3)
    lengths, kept = [16, 8, 0], torch.cat([torch.arange(16), torch.arange(16, 24)])
    ragged = DenseSegment(segment.keys[kept], segment.values[kept], Layout(lengths), first=[0] * 3)
    together = GEARCodec(2, 2, 8, 16, 16, 0.1, 3, 8, 0).encode(ragged, Sealing(3))
    for n in range(2):
        rows = ragged.layout.rows(n)
        alone = DenseSegment(ragged.keys[rows], ragged.values[rows], Layout([lengths[n]]), first=[0])
        expected = GEARCodec(2, 2, 8, 16, 16, 0.1, 3, 8, 0).encode(alone, Sealing(1)).read(slice(None))
        for actual, side in zip(together.read(rows), expected, strict=True):
            assert torch.equal(actual, side)


def test_outliers_of_wide_heads_are_refused_before_any_work() -> None:
    model = tiny_model("llama", head_dim=512, num_attention_heads=1, num_key_value_heads=1)
    with pytest.raises(ValueError, match="outliers must be 0 for heads of more than 256 channels, the model has 512"):
        kvpress.get_press("gear:bits=2")(model).__enter__()
    with kvpress.get_press("gear_l:bits=2")(model):
        pass


def test_generated_chunks_have_their_own_rank_and_basis() -> None:
    codec = GEARCodec(2, 2, 16, 4, 2, 0.0, 3, 16, 0)
    prompt = codec.encode(pairs(), Sealing(3))
    later = [codec.encode(pairs(16, seed=seed), Sealing(3, (prompt,), generated=True)) for seed in (1, 2)]
    ranks = [segment.keys.residual.factor.shape[1] for segment in (prompt, *later)]
    assert ranks == [4, 2, 2]
    assert not prompt.joinable(later[0])
    assert later[0].joinable(later[1])
    for segment in later:
        segment._set_slots(torch.arange(16, dtype=torch.int32).repeat(3))
    joined = UniformSegment.join(later)
    assert joined.keys.residual.basis.shape == (6, 2, 32)
    for n in range(3):
        parts = [segment.read(segment.layout.rows(n))[0] for segment in later]
        assert torch.equal(joined.read(joined.layout.rows(n))[0], torch.cat(parts))
