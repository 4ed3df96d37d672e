# SPDX-License-Identifier: Apache-2.0
"""Rotations and channel scales in every format, and operands that belong to one stream and are read by several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvpress.kernels import Basis, Coded, Listed, Options, Ranges, Rows, decode
from kvpress.kernels.attention import reference
from tests.kernels.builders import (
    Streams,
    assert_same_lse,
    coded,
    correction,
    dense,
    quantise,
    relative_error,
    rotary,
    streams,
)

LIMIT = 1e-3
DIMS = {"keys": 64, "values": 96}


def packed(s: Streams) -> Rows:
    def side(dim: int) -> object:
        return replace(
            quantise(torch.randn(s.rows, dim), 4, (1, 32))[0], correction=correction(s.rows, dim, 2, 0.05)[0]
        )

    return Rows(*map(side, DIMS.values()))


def codes(s: Streams) -> Rows:
    keys, values = (coded(s.rows, dim, 4, 8, books=2) for dim in DIMS.values())
    scales = (0.5 + torch.rand(s.rows) for _ in range(2))
    return Rows(replace(keys, row_scale=next(scales), rotary=rotary(s, 64)), replace(values, row_scale=next(scales)))


FORMATS: dict[str, Callable[[Streams], Rows]] = {
    "dense": lambda s: dense(*(torch.randn(s.rows, dim) for dim in DIMS.values())),
    "packed": packed,
    "coded": codes,
}


def exact(s: Streams, rows: Rows, stream: list[int], scales: bool, rotations: bool) -> tuple[Rows, Rows]:
    """Return rows stored in other bases, and their values as dense rows; each row lies in at most one stream."""
    bases, vectors = {}, {}
    for name, side in (("key", rows.keys), ("value", rows.values)):
        dim = side.channels
        scale, rotation = torch.rand(len(s.lengths), dim) + 0.5, torch.linalg.qr(torch.randn(dim, dim)).Q
        bases[f"{name}_basis"] = Basis(scale if scales else None, rotation if rotations else None)
        vectors[name] = torch.zeros(s.rows, dim)
        for numbers, owner in zip(s.where.numbers(), stream, strict=True):
            vectors[name][numbers] = side.read(numbers, owner) * (scale[owner] if scales else 1)
        if rotations:
            vectors[name] = vectors[name] @ rotation.T
    return replace(rows, **bases), dense(*vectors.values())


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("scales", "rotations"), [(True, False), (False, True), (True, True)])
def test_bases_are_undone(
    name: str, scales: bool, rotations: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    s = streams([5, 0, 200], 4, 64, torch.bfloat16)
    rows, vectors = exact(s, FORMATS[name](s), [0, 1, 2], scales, rotations)
    for where in (s.where, s.listed()):
        out, lse = decode(s.q, rows, where, Options(0.1))
        expected, expected_lse = reference.decode(s.q, vectors, where, Options(0.1))
        assert relative_error(out, expected) < LIMIT
        assert_same_lse(lse, expected_lse, LIMIT)


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("listed", [False, True])
def test_query_tokens_are_streams_of_their_own(
    name: str, listed: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three new tokens have lists of their own, and read the codebooks, scales and shifts of the stream that they belong to."""
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    s = streams([90, 1, 200, 40], 4, 64)
    rows, vectors = exact(s, FORMATS[name](s), [0, 1, 2, 3], scales=True, rotations=True)
    stream = torch.arange(4).repeat_interleave(3)
    q = torch.randn(12, 4, 64)
    starts, lengths = s.starts[stream], s.lengths[stream]
    where: Ranges | Listed = Ranges(starts, lengths, stream)
    if listed:
        numbers = starts[:, None] + (torch.rand(12, 50) * lengths[:, None]).long()
        where = Listed(numbers, torch.randint(1, 51, (12,)), stream)
    out, lse = decode(q, rows, where, Options(0.1))
    expected, expected_lse = reference.decode(q, vectors, where, Options(0.1))
    assert relative_error(out, expected) < LIMIT
    assert_same_lse(lse, expected_lse, LIMIT)


def test_a_turbo_quantised_vector_is_its_scale_times_the_rotated_centroids() -> None:
    """One scalar codebook for all channels, a norm per row, and a rotation: the kernel reads the stored vector."""
    s = streams([70], 4, 64)
    rotation, book = torch.linalg.qr(torch.randn(64, 64)).Q, torch.linspace(-3, 3, 16).view(1, 1, 16, 1)
    vectors, sides = [], []
    for _ in range(2):
        x = torch.randn(s.rows, 64) * (0.1 + torch.rand(s.rows, 1))
        norm = x.norm(dim=-1) / 8
        chosen = ((x / norm[:, None]) @ rotation - book.view(-1, 1, 1)).abs().argmin(0)
        sides.append(Coded(pack(chosen), book, 4, norm.half()))
        vectors.append(norm.half().float()[:, None] * book.flatten()[chosen] @ rotation.T)
        assert relative_error(vectors[-1], x) < 0.2
    basis = Basis(rotation=rotation)
    ours = decode(s.q, Rows(*sides, key_basis=basis, value_basis=basis), s.where, Options(0.2))
    expected = decode(s.q, dense(*vectors), s.where, Options(0.2))
    assert relative_error(ours[0], expected[0]) < 1e-5
    assert_same_lse(ours[1], expected[1], 1e-5)


def pack(codes: Tensor) -> Tensor:
    low, high = codes.to(torch.uint8).chunk(2, dim=-1)
    return low | high << 4


@pytest.mark.parametrize(
    ("basis", "message"),
    [
        ({"key_basis": Basis(torch.zeros(16))}, "key_basis.scale must be float32 \\[streams, 16\\]"),
        ({"key_basis": Basis(torch.zeros(2, 16))}, "key_basis.scale must be float32 \\[1, 16\\]"),
        ({"value_basis": Basis(torch.zeros(1, 16).half())}, "value_basis.scale must be float32"),
        ({"key_basis": Basis(centre=torch.zeros(2, 16))}, "key_basis.centre must be float32 \\[1, 16\\]"),
        ({"value_basis": Basis(centre=torch.zeros(1, 8))}, "value_basis.centre must be .* \\[streams, 16\\]"),
        ({"key_basis": Basis(rotation=torch.zeros(16, 8))}, "key_basis.rotation must be float32 \\[16, 16\\]"),
        ({"value_basis": Basis(rotation=torch.zeros(8, 8))}, "value_basis.rotation must be float32 \\[Dv, 16\\]"),
    ],
)
def test_bad_bases_are_named(basis: dict[str, Basis], message: str) -> None:
    rows, ones = torch.zeros(40, 16), torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        decode(torch.zeros(1, 2, 16), replace(dense(rows, rows), **basis), Ranges(ones, ones), Options(1.0))


@pytest.mark.parametrize("listed", [False, True])
def test_operands_are_not_changed(listed: bool) -> None:
    s = streams([30, 40], 3, 64)
    for build in FORMATS.values():
        rows, _ = exact(s, build(s), [0, 1], scales=True, rotations=True)
        tensors = [t for t in (s.q, s.starts, s.lengths, *rows.keys.tensors(), *rows.values.tensors()) if t is not None]
        before = [tensor.clone() for tensor in tensors]
        decode(s.q, rows, s.listed() if listed else s.where, Options(0.1, softcap=3.0, sinks=torch.zeros(2, 3)))
        assert all(map(torch.equal, tensors, before))
