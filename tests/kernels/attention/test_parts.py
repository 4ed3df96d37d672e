# SPDX-License-Identifier: Apache-2.0
"""Attention in one call to several sets of rows, each in its own format."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor

from kvpress.kernels import (
    Basis,
    Listed,
    Options,
    Part,
    Ranges,
    Rows,
    counters,
    decode,
    decode_parts,
    merge,
    reset_counters,
)
from kvpress.kernels.attention import cpu
from tests.kernels.builders import assert_same_lse, coded, dense, quantise, relative_error, streams
from tests.kernels.compiler import NATIVE, needs_compiler

DIM, NAMES = 64, ("dense", "packed", "coded")


def part(name: str, lengths: list[int], channels: int = DIM) -> Part:
    s = streams(lengths, 1, DIM)
    if name == "dense":
        return Part(dense(torch.randn(s.rows, DIM), torch.randn(s.rows, channels), torch.randn(s.rows)), s.where)
    if name == "packed":
        return Part(Rows(*(quantise(torch.randn(s.rows, DIM), 4, (1, DIM))[0] for _ in range(2))), s.where)
    return Part(
        Rows(*(coded(s.rows, DIM, 4, 8) for _ in range(2))), Ranges(s.starts, s.lengths, torch.tensor([2, 0, 1]))
    )


def one_by_one(q: Tensor, parts: list[Part], options: Options) -> tuple[Tensor, Tensor]:
    earlier = Options(options.scale, options.softcap)
    options_of_parts = [earlier] * (len(parts) - 1) + [options]
    return merge([decode(q, p.rows, p.where, how) for p, how in zip(parts, options_of_parts, strict=True)])


@needs_compiler
@pytest.mark.parametrize("level", NATIVE)
@pytest.mark.parametrize("causal", [0, 2])
@pytest.mark.parametrize(
    "names", [("coded", "dense"), ("dense", "packed", "dense"), ("packed", "coded", "dense", "dense")]
)
def test_they_are_merged_as_one_by_one(names: tuple[str, ...], causal: int, level: str) -> None:
    parts = [part(name, [5 + i, 0, 70]) for i, name in enumerate(names)]
    q, options = torch.randn(3, 4, DIM).bfloat16(), Options(0.2, causal=causal)
    merged = cpu.decode_parts(q, parts, options, level=level)
    options_of_parts = [Options(0.2)] * (len(parts) - 1) + [options]
    results = [cpu.decode(q, p.rows, p.where, how, level) for p, how in zip(parts, options_of_parts, strict=True)]
    assert all(map(torch.equal, merged, cpu.merge(results, level)))
    assert merged[0][2].norm() > 0.5


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_the_operator_does_with_and_without_kernels(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    parts = [part(name, [9, 2, 33]) for name in NAMES]
    parts.insert(1, Part(turned(parts[0].rows), parts[0].where))
    parts.append(part("dense", [4, 4, 4]))
    q, options = torch.randn(3, 4, DIM), Options(0.2, causal=1)
    reset_counters()
    out, lse = decode_parts(q, parts, options)
    if kernels == "1":
        assert counters() == {"dense_decode": 3, "packed_decode": 1, "coded_decode": 1}
    expected, expected_lse = one_by_one(q, parts, options)
    assert relative_error(out, expected) < 1e-5
    assert_same_lse(lse, expected_lse, 1e-5)


def turned(rows: Rows) -> Rows:
    """Return the same rows with a random basis, so that they decode to other keys and values."""
    basis = Basis(rotation=torch.linalg.qr(torch.randn(DIM, DIM)).Q)
    return Rows(rows.keys, rows.values, None, basis, basis)


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("count", [1, 2])
def test_results_over_other_rows_are_merged_with_theirs(
    monkeypatch: pytest.MonkeyPatch, kernels: str, count: int
) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    parts = [part(name, [9, 2, 33]) for name in ("dense", "coded", "packed", "dense")]
    q, options = torch.randn(3, 4, DIM), Options(0.2)
    others = [decode(q, p.rows, p.where, options) for p in parts[count:]]
    out, lse = decode_parts(q, parts[:count], options, others)
    expected, expected_lse = one_by_one(q, parts, options)
    assert relative_error(out, expected) < 1e-6
    assert_same_lse(lse, expected_lse, 1e-6)


def test_sinks_are_seen_once() -> None:
    parts, q = [part("dense", [3, 4, 5]), part("packed", [6, 7, 8])], torch.randn(3, 4, DIM)
    sinks = torch.randn(3, 4)
    out, lse = decode_parts(q, parts, Options(0.2, sinks=sinks))
    plain, plain_lse = decode_parts(q, parts, Options(0.2))
    assert_same_lse(lse, torch.logaddexp(plain_lse, sinks), 1e-6)
    assert relative_error(out, plain * torch.exp(plain_lse - lse)[..., None]) < 1e-6


def test_lists_may_be_empty() -> None:
    dense_part, q = part("dense", [3, 4, 5]), torch.randn(3, 4, DIM)
    empty = Listed(torch.zeros(3, 0, dtype=torch.int32), torch.zeros(3, dtype=torch.int64))
    result = decode_parts(q, [Part(dense_part.rows, empty), dense_part], Options(0.2))
    assert all(map(torch.equal, result, decode(q, dense_part.rows, dense_part.where, Options(0.2))))


def test_rows_that_are_not_stored_are_named() -> None:
    dense_part, q = part("dense", [3, 4, 5]), torch.randn(3, 4, DIM)
    beyond = Part(dense_part.rows, Ranges(torch.tensor([0, 0, 9]), torch.tensor([3, 3, dense_part.rows.count])))
    with pytest.raises(ValueError, match=f"stream 2 refers to rows outside the {dense_part.rows.count} stored ones"):
        decode_parts(q, [part("packed", [3, 4, 5]), beyond, dense_part], Options(0.2))


def test_bad_parts_are_refused() -> None:
    dense_part, q = part("dense", [3, 4, 5]), torch.randn(3, 4, DIM)
    with pytest.raises(ValueError, match="parts must hold at least one, got none"):
        decode_parts(q, [], Options(0.2))
    with pytest.raises(ValueError, match="values of all parts must have the same number of channels, got 64 and 32"):
        decode_parts(q, [dense_part, part("dense", [3, 4, 5], channels=32)], Options(0.2))
    with pytest.raises(ValueError, match=r"starts must be int64 \[2\], got int64 \[3\]"):
        decode_parts(q[:2], [part("dense", [3, 4, 5]), dense_part], Options(0.2))
    narrow = torch.zeros(3, 4, 32), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"out must be float32 \[3, 4, 64\], got float32 \[3, 4, 32\]"):
        decode_parts(q, [dense_part], Options(0.2), [narrow])
    listed = Part(dense_part.rows, streams([3, 4, 5], 1, DIM).listed())
    with pytest.raises(ValueError, match="causal must be 0 for listed rows"):
        decode_parts(q, [dense_part, listed], Options(0.2, causal=1))


def test_a_copy_reads_its_own_rows() -> None:
    dense_part, q, options = part("dense", [30, 40, 50]), torch.randn(3, 4, DIM), Options(0.2)
    before = decode_parts(q, [dense_part, dense_part], options)  # caches the operand's packed struct
    twin = copy.deepcopy(dense_part)
    for tensor in (dense_part.rows.keys.storage, dense_part.rows.values.storage):
        tensor.zero_()
    assert all(map(torch.equal, decode_parts(q, [twin, twin], options), before))
    assert decode_parts(q, [dense_part, dense_part], options)[0].count_nonzero() == 0


@needs_compiler
@pytest.mark.parametrize("names", [("dense",), ("packed", "dense"), ("coded", "packed", "dense")])
def test_a_later_step_packs_nothing_and_sees_what_changed(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, options = [part(name, [40, 0, 7]) for name in names], Options(0.2)
    decode_parts(torch.randn(3, 4, DIM), parts, options)

    def refuse(*args: object) -> None:
        raise AssertionError("a repeated step checks and packs nothing")

    q = torch.randn(3, 4, DIM)
    expected, expected_lse = one_by_one(q, parts, options)
    parts[-1].where.lengths[1] = 5  # a window that grows in place
    parts[-1].rows.values.storage[0] += 1.0
    grown, grown_lse = one_by_one(q, parts, options)
    reset_counters()
    with monkeypatch.context() as patch:
        patch.setattr("kvpress.kernels.attention.contract.check", refuse)
        patch.setattr(cpu, "packed", refuse)
        out, lse = decode_parts(q, parts, options)
    assert counters()[f"{names[-1]}_decode"] == 1
    assert relative_error(out, grown) < 1e-5
    assert_same_lse(lse, grown_lse, 1e-5)
    assert not torch.allclose(out, expected)
    assert not torch.allclose(lse, expected_lse)


@needs_compiler
def test_another_step_is_packed_anew() -> None:
    first, second, window = (part(name, [6, 9, 7]) for name in ("packed", "coded", "dense"))
    options = Options(0.2)
    decode_parts(torch.randn(3, 4, DIM), [first, window], options)
    q = torch.randn(3, 4, DIM)
    steps = [
        (q, [second, window], options),
        (q, [window], options),
        (q, [first, second, window], options),
        (q, [first, window], Options(0.3)),
        (q, [first, window], Options(0.2, causal=2)),
        (q, [first, window], Options(0.2, softcap=3.0)),
        (q[:, :2], [first, window], options),
        (q.bfloat16(), [first, window], options),
    ]
    for queries, parts, settings in steps:
        out, lse = decode_parts(queries, parts, settings)
        expected, expected_lse = one_by_one(queries, parts, settings)
        assert relative_error(out, expected) < 1e-3
        assert_same_lse(lse, expected_lse, 1e-2)
    with pytest.raises(ValueError, match="keys"):
        decode_parts(q[..., :32], [first, window], options)


@needs_compiler
def test_a_packed_call_keeps_no_part_alive() -> None:
    gc.disable()
    try:
        sealed, window = part("packed", [6, 9, 7]), part("dense", [4, 4, 4])
        decode_parts(torch.randn(3, 4, DIM), [sealed, window], Options(0.2))
        watched = [weakref.ref(x) for x in (sealed, window)]
        del sealed
        assert watched[0]() is None
        del window
        assert watched[1]() is None
    finally:
        gc.enable()
