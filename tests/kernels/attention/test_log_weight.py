# SPDX-License-Identifier: Apache-2.0
"""One row with log-weight log n gives the result of n equal rows, in every format and operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import (
    Basis,
    Coded,
    Correction,
    Dense,
    Listed,
    Options,
    Packed,
    Rows,
    column_mass,
    column_max,
    decode,
)
from kvpress.kernels.attention import cpu, reference
from kvpress.kernels.mass import cpu as mass_cpu
from kvpress.kernels.mass import reference as mass_reference
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
from tests.kernels.compiler import LEVELS, NATIVE

BACKENDS = [None, *LEVELS]


def pooled(lengths: list[int], queries: int, dim: int) -> tuple[Streams, Streams, Tensor, Tensor]:
    """Return streams of single rows, streams of repeated rows, the copies of each row, and the source of each repeated row."""
    few = streams(lengths, queries, dim)
    copies = torch.randint(1, 7, (few.rows,))
    source = torch.arange(few.rows).repeat_interleave(copies)
    ends = copies.cumsum(0)
    starts = ends[few.starts] - copies[few.starts]
    last = ends[few.starts + few.lengths - 1]
    many = Streams(few.q, starts, torch.where(few.lengths > 0, last - starts, 0), len(source))
    return few, many, copies, source


def taken(terms: Correction | None, rows: Tensor) -> Correction | None:
    """Return the low-rank correction of some rows."""
    return None if terms is None else replace(terms, factor=terms.factor[rows], chunk=terms.chunk[rows])


def repeated(side: Any, rows: Tensor) -> Any:
    """Return the storage of some rows, which may repeat."""
    if isinstance(side, Dense):
        return Dense(side.data[rows])
    if isinstance(side, Coded):
        scale = None if side.row_scale is None else side.row_scale[rows]
        angles = side.rotary and replace(side.rotary, positions=side.rotary.positions[rows])
        return replace(side, codes=side.codes[rows], row_scale=scale, rotary=angles)
    codes, terms = side.codes[rows], taken(side.correction, rows)
    if side.group[0] == 1:
        return replace(side, codes=codes, scale=side.scale[rows], zero=side.zero[rows], correction=terms)
    lengths = (rows // side.group[0]).bincount(minlength=len(side.scale)).int()
    return replace(side, codes=codes, group_lengths=lengths, correction=terms)


def packed(s: Streams, corrected: bool = False) -> tuple[Packed, Packed]:
    sides = quantise(torch.randn(s.rows, 64), 4, (32, 1))[0], quantise(torch.randn(s.rows, 64), 2, (1, 32))[0]
    if corrected:
        sides = tuple(replace(side, correction=correction(s.rows, 64, 3, 0)[0]) for side in sides)
    return sides


def bases(s: Streams) -> dict[str, Basis]:
    rotation = torch.linalg.qr(torch.randn(64, 64)).Q
    return {f"{name}_basis": Basis(0.5 + torch.rand(len(s.lengths), 64), rotation) for name in ("key", "value")}


def scaled(s: Streams) -> tuple[Coded, Coded]:
    return tuple(replace(coded(s.rows, 64, 1, 4, shared=True), row_scale=0.2 + torch.rand(s.rows)) for _ in range(2))


FORMATS: dict[str, Callable[[Streams], Rows]] = {
    "dense": lambda s: dense(torch.randn(s.rows, 64), torch.randn(s.rows, 64)),
    "dense bf16": lambda s: dense(torch.randn(s.rows, 64).bfloat16(), torch.randn(s.rows, 64).bfloat16()),
    "packed": lambda s: Rows(*packed(s)),
    "packed, corrected": lambda s: Rows(*packed(s, corrected=True)),
    "packed in another basis": lambda s: Rows(*packed(s), **bases(s)),
    "coded": lambda s: Rows(coded(s.rows, 64, 4, 8), coded(s.rows, 64, 4, 8)),
    "coded before rotary": lambda s: Rows(
        replace(coded(s.rows, 64, 4, 8), rotary=rotary(s, 64)), coded(s.rows, 64, 4, 8)
    ),
    "coded with row scales": lambda s: Rows(*scaled(s), **bases(s)),
}


def attend(level: str | None, q: Tensor, rows: Rows, where: Any, options: Options) -> tuple[Tensor, Tensor]:
    """Run one back end inside the operator: the reference without a level; bases are applied here where it does not."""
    if level in NATIVE:
        return cpu.decode(q, rows, where, options, level)
    if rows.key_basis is not None:
        q = rows.key_basis.enter(q, None)
    args = (q, replace(rows, key_basis=None, value_basis=None), where, options)
    out, lse = reference.decode(*args) if level is None else cpu.decode(*args, level=level)
    return (out if rows.value_basis is None else rows.value_basis.leave(out, None)), lse


@pytest.mark.parametrize("level", BACKENDS)
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_pooled_rows_attend_as_repeated_rows(name: str, listed: bool, level: str | None) -> None:
    few, many, copies, source = pooled([1, 40, 130], 6, 64)
    rows = FORMATS[name](few)
    unpooled = replace(rows, keys=repeated(rows.keys, source), values=repeated(rows.values, source))
    pooled_rows = replace(rows, log_weight=copies.float().log())
    options = Options(0.125, softcap=4.0)
    ours = attend(level, few.q, pooled_rows, few.listed() if listed else few.where, options)
    expected = attend(level, many.q, unpooled, many.listed() if listed else many.where, options)
    # Integer kernels round the weights of a block together, and the two runs have different blocks.
    limit = 1e-3 if "packed" in name and level else 1e-5
    assert relative_error(ours[0], expected[0]) < limit
    assert_same_lse(ours[1], expected[1], limit)


@pytest.mark.parametrize("level", BACKENDS)
@pytest.mark.parametrize("name", FORMATS)
def test_weights_of_16_bits_are_read_as_they_are(name: str, level: str | None) -> None:
    s = streams([1, 40, 130], 6, 64)
    half = torch.randn(s.rows).half()
    rows = FORMATS[name](s)
    results = [attend(level, s.q, replace(rows, log_weight=w), s.where, Options(0.125)) for w in (half, half.float())]
    assert all(map(torch.equal, *results))
    without = attend(level, s.q, rows, s.where, Options(0.125))
    assert relative_error(without[0], results[0][0]) > 0.01


@pytest.mark.parametrize("level", BACKENDS)
@pytest.mark.parametrize("statistic", ["sum", "squares", "max"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooled_rows_receive_the_weights_of_repeated_rows(
    statistic: Any, dtype: torch.dtype, level: str | None
) -> None:
    few, many, copies, source = pooled([1, 40, 130], 6, 64)
    q, keys = few.q.to(dtype), torch.randn(few.rows, 64).to(dtype)

    def receive(rows: Rows, s: Streams) -> Tensor:
        args = (q, rows, s.where, Options(0.125, softcap=4.0), statistic)
        return mass_reference.receive(*args) if level is None else mass_cpu.receive(*args, level=level)

    ours = receive(dense(keys, keys, copies.float().log()), few)
    received = receive(dense(keys[source], keys[source]), many)
    # Each of n equal rows receives the n-th part of every weight.
    first = copies.cumsum(0) - copies
    parts = {"sum": copies, "squares": copies**2, "max": copies}[statistic]
    assert relative_error(ours, received[first] * parts) < 1e-5


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_operators_add_log_weights(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    few, many, copies, source = pooled([0, 40], 6, 64)
    keys, values = torch.randn(2, few.rows, 64)
    rows, unpooled = dense(keys, values, copies.float().log()), dense(keys[source], values[source])
    ours, expected = (decode(s.q, r, s.where, Options(0.1)) for s, r in ((few, rows), (many, unpooled)))
    assert relative_error(ours[0], expected[0]) < 1e-5
    assert_same_lse(ours[1], expected[1], 1e-5)
    lse = expected[1].nan_to_num(neginf=0.0)
    for operator in (column_mass, column_max):
        received = operator(many.q, unpooled, many.where, Options(0.1), lse=lse)
        actual = operator(few.q, rows, few.where, Options(0.1), lse=lse)
        assert relative_error(actual, received[copies.cumsum(0) - copies] * copies) < 1e-5


@pytest.mark.parametrize("level", BACKENDS)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_without_weight_are_not_there(name: str, level: str | None) -> None:
    s = streams([40, 130], 6, 64)
    log_weight = torch.zeros(s.rows).masked_fill(torch.rand(s.rows) < 0.5, float("-inf"))
    rows = FORMATS[name](s)
    kept = [numbers[log_weight[numbers] == 0] for numbers in s.where.numbers()]
    width = max(map(len, kept))
    numbers = torch.stack([torch.cat([k, k.new_zeros(width - len(k))]) for k in kept])
    some = Listed(numbers, torch.tensor([len(k) for k in kept]))
    ours = attend(level, s.q, replace(rows, log_weight=log_weight), s.where, Options(0.125))
    expected = attend(level, s.q, rows, some, Options(0.125))
    limit = 1e-3 if "packed" in name and level else 1e-5
    assert relative_error(ours[0], expected[0]) < limit
    assert_same_lse(ours[1], expected[1], limit)
