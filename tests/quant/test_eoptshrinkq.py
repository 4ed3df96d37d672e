# SPDX-License-Identifier: Apache-2.0
"""Optimal shrinkage of singular values: its formula, its rank on known signals, and the codes of the rest."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.cache.codec import Sealing
from kvpress.cache.segment import DenseSegment, OfStreams
from kvpress.quant.eoptshrinkq import ShrunkSegment, shrinkage, shrunk
from kvpress.quant.hadamard import hadamard
from tests.caches import prefill
from tests.models import tiny_model, tokens


def spiked(rows: int, channels: int, sizes: list[float], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return a signal with singular values of about `sizes`, and the signal plus unit noise."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(rows, len(sizes), generator=generator)).Q
    right = torch.linalg.qr(torch.randn(channels, len(sizes), generator=generator)).Q
    signal = left * torch.tensor(sizes) @ right.T
    return signal, signal + torch.randn(rows, channels, generator=generator)


def reference(x: Tensor) -> list[float]:
    """Shrunk singular values, number by number."""
    p, n = sorted(x.shape)
    s = torch.linalg.svdvals(x.double()).tolist()
    lam = [value**2 for value in s]
    k = math.floor(p ** (1 / 2.01))
    edge = lam[k] + 1.1 / (2 ** (2 / 3) - 1) * (lam[k] - lam[2 * k])
    rank = sum(value > edge for value in lam)
    noise = list(s)
    for i in range(2 * rank):
        ahead = (1 - (i / (2 * rank)) ** (2 / 3)) / (2 ** (2 / 3) - 1)
        noise[i] = s[2 * rank] + ahead * (s[2 * rank] - s[4 * rank])
    values = []
    for spike in lam[:rank]:
        m1 = sum(1 / (z**2 - spike) for z in noise) / p
        slope1 = sum(1 / (z**2 - spike) ** 2 for z in noise) / p
        m2 = -(1 - p / n) / spike + m1 * p / n
        slope2 = (1 - p / n) / spike**2 + slope1 * p / n
        slope = m1 * m2 + spike * slope1 * m2 + spike * m1 * slope2
        d = 1 / math.sqrt(spike * m1 * m2)
        values.append(d * math.sqrt(m1 / (d**2 * slope) * m2 / (d**2 * slope)))
    return values


@pytest.mark.parametrize(("rows", "channels"), [(400, 64), (48, 128), (64, 64)])
def test_shrinkage_follows_the_formula_and_finds_the_rank(rows: int, channels: int) -> None:
    signal, noisy = spiked(rows, channels, [90.0, 60.0])
    eigenvalues = torch.linalg.svdvals(noisy.double()).square()
    values = shrinkage(eigenvalues, max(rows, channels))
    assert len(values) == 2
    assert values.tolist() == pytest.approx(reference(noisy), rel=1e-9)
    assert bool((values < eigenvalues[:2].sqrt()).all())
    columns, basis = shrunk(noisy, 8)
    left, singular, right = torch.linalg.svd(noisy, full_matrices=False)
    truncated = left[:, :2] * singular[:2] @ right[:2]
    error = (columns @ basis - signal).square().sum()
    assert float(error) < float((truncated - signal).square().sum())
    torch.testing.assert_close(columns @ basis, (left[:, :2] * values.float() @ right[:2]), atol=1e-3, rtol=1e-3)
    assert shrunk(noisy, 1)[0].shape == (rows, 1)


@pytest.mark.parametrize("shape", [(1, 32), (2, 32), (5, 1), (1, 1)])
def test_tiny_matrices_have_no_low_rank_part(shape: tuple[int, int]) -> None:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    columns, basis = shrunk(noise, 4)
    assert (columns.shape, basis.shape) == ((shape[0], 0), (0, shape[1]))


def test_equal_eigenvalues_have_no_low_rank_part() -> None:
    assert shrunk(torch.zeros(40, 32), 4)[0].shape == (40, 0)
    assert shrunk(torch.eye(32).repeat(3, 1), 4)[0].shape == (96, 0)


def test_decoded_pairs_are_the_low_rank_part_plus_codes_of_the_rest() -> None:
    model, ids = tiny_model("llama"), tokens(1, 256)
    full = prefill(model, kvpress.BasePress(), ids)
    stored = prefill(model, kvpress.EOptShrinkQPress(3, rank=8, residual_length=0), ids)
    matrix, ranks = hadamard(32, torch.device("cpu")), []
    for layer, original in zip(stored.layers, full.layers, strict=True):
        (segment,) = (part for part in layer.store.segments if isinstance(part, ShrunkSegment))
        for name in ("keys", "values"):
            side, exact = getattr(segment, name), getattr(original, name)[0]
            columns, basis = (torch.stack(parts) for parts in zip(*[low_rank(head) for head in exact], strict=True))
            low = side.residual.operand(512).dense(torch.arange(512), 32) @ matrix.T
            torch.testing.assert_close(low.view(2, 256, 32), columns @ basis, atol=5e-3, rtol=5e-3)
            rest, step = (exact.flatten(0, 1) - low) @ matrix, side.step.float()[:, None]
            error = (getattr(layer, name)[0] - exact).flatten(0, 1) @ matrix
            is_inside = rest.abs() <= 3.9 * step
            assert float(is_inside.float().mean()) > 0.95
            assert float((error.abs() / step)[is_inside].max()) <= 0.75  # codes belong to the step of a round before
            assert float((error / step)[is_inside].square().mean()) == pytest.approx(1 / 12, rel=0.15)
            ranks.append(int(side.residual.factor.count_nonzero(dim=0).gt(0).sum()))
    assert max(ranks) > 0


def low_rank(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low-rank part of a head with 8 columns, zeros where it has fewer."""
    columns, basis = shrunk(x, 8)
    missing = 8 - columns.shape[1]
    return torch.nn.functional.pad(columns, (0, missing)), torch.nn.functional.pad(basis, (0, 0, 0, missing))


def test_attention_reads_the_pairs_as_they_are_decoded() -> None:
    model, ids, new = tiny_model("llama"), tokens(2, 150), tokens(2, 3, seed=4)
    stored = prefill(model, kvpress.EOptShrinkQPress(4, rank=3, residual_length=8), ids)
    dense = DynamicCache()
    for index, layer in enumerate(stored.layers):
        dense.update(layer.keys, layer.values, index)
    with kvpress.reading(model):
        actual = model(new, past_key_values=stored).logits
    # Kernels round queries to 16 bits for keys with one scale.
    torch.testing.assert_close(actual, model(new, past_key_values=dense).logits, atol=2e-2, rtol=1e-2)


def test_the_low_rank_part_pays_where_vectors_share_directions() -> None:
    """With the same bits, the error is below that of codes alone; outputs stay finite for numbers of any size."""
    _, noisy = spiked(256, 32, [300.0, 200.0])
    codec, plain = kvpress.EOptShrinkQPress(2).layer_codec(0), kvpress.RotatedPress(2).layer_codec(0)
    segment = DenseSegment(noisy, noisy.clone(), OfStreams([256]))
    errors = [
        float((coder.encode(segment, Sealing(1)).decode(slice(None))[0] - noisy).square().mean())
        for coder in (codec, plain)
    ]
    assert errors[0] < 0.3 * errors[1]
    huge = DenseSegment(noisy * 1e4, noisy * 1e4, OfStreams([256]))
    with pytest.raises(ValueError, match="low-rank part in float16, at most 65504"):
        codec.encode(huge, Sealing(1))


def test_a_rank_outside_of_the_kernels_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank must be in \[1, 16\], got 0"):
        kvpress.EOptShrinkQPress(rank=0)
