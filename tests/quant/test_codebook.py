# SPDX-License-Identifier: Apache-2.0
"""Angles of keys that are coded before their rotary embedding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvpress.cache.layout import Layout
from kvpress.cache.rotation import Angles, KeyRotation
from kvpress.cache.segment import DenseSegment
from kvpress.kernels import Rotary

CPU = torch.device("cpu")
FREQUENCY = 1e4 ** -torch.arange(0, 1, 1 / 16, dtype=torch.float64)

Embedding = Callable[[Tensor], tuple[Tensor, Tensor]]


def embedding(
    factor: float = 1.0, dtype: torch.dtype = torch.float32, product: torch.dtype = torch.float64
) -> Embedding:
    """Angles as a model computes them: positions times frequencies in one type, cosines and sines in another."""

    def compute(positions: Tensor) -> tuple[Tensor, Tensor]:
        angle = (positions[..., None].to(product) * FREQUENCY.to(product)).repeat(1, 1, 2)
        return (factor * angle.cos()).to(dtype), (factor * angle.sin()).to(dtype)

    return compute


def grown(positions: int, compute: Embedding) -> Angles:
    angles = Angles()
    angles.grow(positions, compute, CPU, "Attention")
    return angles


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_every_position_has_the_angles_and_the_length_of_the_model(factor: float) -> None:
    at = torch.tensor([0, 63, 64, 65, 131071])
    angles = grown(131072, embedding(factor))
    angles_read = Rotary(angles.coarse, angles.fine, shift=at).angles(at)
    exact = at[:, None] * FREQUENCY
    for actual, expected in zip(angles_read, (exact.cos(), exact.sin()), strict=True):
        assert (actual - factor * expected).abs().max() < 1e-6 * factor


def test_tables_grow_by_the_positions_that_are_missing() -> None:
    angles, newest_positions = Angles(), []

    def compute(positions: Tensor) -> tuple[Tensor, Tensor]:
        newest_positions.append(int(positions.max()))
        return embedding()(positions)

    for positions in (10, 64, 65, 300, 200):
        angles.grow(positions, compute, CPU, "Attention")
    at_once = grown(300, embedding())
    assert torch.equal(angles.coarse, at_once.coarse)
    assert torch.equal(angles.fine, at_once.fine)
    assert newest_positions == [63, 64, 299]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [300, 131072])
def test_rounded_angles_are_linear_enough(dtype: torch.dtype, positions: int) -> None:
    assert len(grown(positions, embedding(1.2, dtype, torch.float32)).coarse) == -(-positions // 64)


def test_frequencies_that_change_with_the_length_are_refused() -> None:
    def compute(positions: Tensor) -> tuple[Tensor, Tensor]:
        return embedding()(positions if positions.max() < 500 else positions / 1.1)

    assert len(grown(700, compute).coarse) == 11
    angles = grown(400, compute)
    before = angles.coarse
    with pytest.raises(NotImplementedError, match="embedding of Attention is not linear in the position"):
        angles.grow(700, compute, CPU, "Attention")
    assert angles.coarse is before
    with pytest.raises(NotImplementedError, match="not linear"):
        grown(400, lambda positions: embedding()(positions.double().sqrt()))


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("evicted", [False, True])
def test_keys_survive_turning_back_and_forth(dtype: torch.dtype, error: float, padded: bool, evicted: bool) -> None:
    lengths, keys = torch.tensor([100, 0, 70]), torch.randn(170, 40)  # 8 of the 40 channels are not rotated
    columns = torch.cat([torch.arange(9, 109), torch.arange(20, 90)]).int()
    if evicted:
        columns += torch.cat([torch.randint(0, 3, (size,)).cumsum(0) for size in (100, 70)]).int()
    segment = DenseSegment(keys, keys, Layout(lengths.tolist()))
    segment._set_slots(columns)
    pads = torch.tensor([5, 0, 20]) if padded else torch.zeros(3, dtype=torch.int64)
    position = columns - pads.repeat_interleave(lengths)
    rotation = KeyRotation(grown(400, embedding(1.3, dtype)), pads if padded else None)
    back = rotation.unrotate(segment)

    cos, sin = (part[0, :, :16].float() for part in embedding(1.3, dtype)(position[None]))
    low, high = back[:, :16], back[:, 16:32]
    forth = torch.cat([low * cos - high * sin, high * cos + low * sin, back[:, 32:]], dim=1)
    assert (forth - keys).abs().max() < error  # the model's own angles, as far as it rounds them

    rotary = rotation.rotary(rotation.shift(segment), segment.positions)
    stream, rows = torch.arange(3).repeat_interleave(lengths), torch.arange(170)
    assert torch.equal(rotary.at(stream, rows), position.long())
    torch.testing.assert_close(rotary.rotate(back, position.long()), keys, atol=2e-6, rtol=1e-5)


def test_positions_are_those_of_tokens_beside_padding_and_0_without_a_token() -> None:
    """The second stream has padding between its pairs, the third behind them only, and the last a pair without a token."""
    mask = torch.ones(4, 60, dtype=torch.bool)
    mask[1, 10:40] = mask[2, 10:40] = mask[3, :3] = False
    slots = [[0, 2, 3], [8, 9, 40, 59], [4, 9], [-1, 3, 7]]
    expected = [[0, 2, 3], [8, 9, 10, 29], [4, 9], [0, 0, 4]]
    for rows in ([0], [2], [0, 2], [3], [0, 1, 2, 3]):
        keys = torch.randn(sum(len(slots[n]) for n in rows), 40)
        segment = DenseSegment(keys, keys, Layout(len(slots[n]) for n in rows))
        segment._set_slots(torch.tensor([slot for n in rows for slot in slots[n]]))
        rotation = KeyRotation.of(grown(60, embedding()), segment, mask[rows])
        assert rotation.positions(segment).tolist() == [position for n in rows for position in expected[n]]
        assert (rotation.places is None) == (rows in ([0], [2], [0, 2]))
        rotary = rotation.rotary(rotation.shift(segment), segment.positions)
        at = rotary.at(segment.layout.stream_of_row, torch.arange(len(keys)))
        torch.testing.assert_close(rotary.rotate(rotation.unrotate(segment), at), keys, atol=2e-6, rtol=1e-5)
