# SPDX-License-Identifier: Apache-2.0
"""SQuat: `kivi` without weight, and less error where queries look with it."""

from __future__ import annotations

import pytest
import torch

import kvpress
from kvpress.cache.codec import Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import QueryGram
from kvpress.quant.squat import OrthogonalCodec
from kvpress.quant.uniform import UniformRows
from tests.models import padded_batch, position_ids, tiny_model


def problem(queries: int = 6, dim: int = 32) -> tuple[DenseSegment, torch.Tensor, QueryGram]:
    torch.manual_seed(0)
    keys, values = torch.randn(2, 128, dim)
    q = 5 * torch.randn(2, queries, dim)
    watched = QueryGram()
    watched.gram = (q.mT @ q)[None]
    return DenseSegment(keys, values, Layout([64, 64])), q, watched


def codec(weight: float, channels: int = 16, rank: int = 60) -> OrthogonalCodec:
    return OrthogonalCodec(2, 2, (32, 1), (1, 32), 32, 0, rank=rank, weight=weight, channels=channels)


def decoded(weight: float, channels: int = 16, rank: int = 60) -> torch.Tensor:
    segment, _, watched = problem()
    sealing = Sealing(2, observers={Wanted(QueryGram): watched})
    return codec(weight, channels, rank).encode(segment, sealing).read(slice(None))[0]


def test_without_weight_it_is_kivi() -> None:
    segment, _, _ = problem()
    plain = UniformRows.encode(segment.keys, 2, (32, 1)).read(slice(None))
    assert torch.equal(decoded(0.0), plain)
    assert not torch.equal(decoded(1.0), plain)


def test_errors_fall_where_queries_look_and_grow_elsewhere() -> None:
    segment, q, _ = problem()

    def errors(weight: float) -> tuple[float, float]:
        error = (decoded(weight) - segment.keys).view(2, 64, -1)
        return float((error @ q.mT).norm()), float(error.norm())

    query_errors, key_errors = zip(*(errors(weight) for weight in (0.0, 1e-2, 1.0)), strict=True)
    assert query_errors[2] < 0.75 * query_errors[0]
    assert query_errors[1] < query_errors[0]
    assert key_errors[2] > key_errors[0]


@pytest.mark.parametrize(("channels", "rank"), [(16, 60), (8, 60), (8, 3)])
def test_channels_move_by_the_closed_form(channels: int, rank: int) -> None:
    """Block by block, the channels not encoded yet minimise |e|^2 + weight * |Q e|^2."""
    segment, _, watched = problem()
    assert watched.gram is not None
    actual = codec(0.5, channels, rank).moved(segment, watched.gram[0])
    for n in range(2):
        values, vectors = torch.linalg.eigh(watched.gram[0, n].double())
        gram = vectors[:, -rank:] * values[-rank:].clamp_min(0) @ vectors[:, -rank:].T
        a = torch.eye(32, dtype=torch.float64) + 0.5 * gram
        keys, error = segment.keys[segment.layout.rows(n)].double(), torch.zeros(64, 0, dtype=torch.float64)
        for start in range(0, 32, channels):
            # The errors of all channels so far decide, not only those of the block before.
            moved = keys[:, start:]
            if start:
                moved = moved - error @ a[:start, start:] @ torch.linalg.inv(a[start:, start:])
            block = moved[:, :channels]
            torch.testing.assert_close(
                actual[segment.layout.rows(n), start : start + channels], block.float(), atol=1e-4, rtol=1e-4
            )
            coded = UniformRows.encode(block.float(), 2, (32, 1)).read(slice(None))
            error = torch.cat([error, coded.double() - keys[:, start : start + channels]], dim=1)


def test_a_row_has_its_own_queries() -> None:
    model, (ids, mask) = tiny_model("qwen3"), padded_batch([90, 60])
    press = kvpress.get_press("squat:bits=2,group_size=16,residual_length=0,block_size=8,weight=1.0")
    with press(model) as session:
        model(ids, attention_mask=mask, position_ids=position_ids(mask))
        together = session.cache.layers[0].store
    with press(model) as session:
        model(ids[1:, -60:])
        alone = session.cache.layers[0].store
    batch_segment, alone_segment = together.segments[0], alone.segments[0]
    for head in range(2):
        for a, b in zip(
            batch_segment.read(batch_segment.layout.rows(2 + head)),
            alone_segment.read(alone_segment.layout.rows(head)),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_rotated_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="rotate must be False for squat"):
        kvpress.SQuatPress(rotate=True).recipe()


@pytest.mark.parametrize(("spec", "allowed"), [("block_size=1", [4, 8, 16]), ("bits=3,block_size=4", [8, 16])])
def test_blocks_that_do_not_fill_bytes_are_refused_before_any_work(spec: str, allowed: list[int]) -> None:
    expected = f"block_size must divide the head dim 32 of the model into blocks of whole bytes, .* one of {allowed}"
    with pytest.raises(ValueError, match=expected.replace("[", r"\[").replace("]", r"\]")):
        kvpress.get_press(f"squat:{spec}")(tiny_model("llama")).__enter__()
    with kvpress.get_press(f"squat:{spec},weight=0")(tiny_model("llama")):  # one block
        pass
