# SPDX-License-Identifier: Apache-2.0
"""Keys with an offset give the result of keys to which the rotated offset was added, in every format and back end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvpress.kernels import Dense, Offset, Options, Ranges, Rows, decode, dispatch
from kvpress.kernels.attention import cpu, reference
from tests.kernels.builders import Streams, assert_same_lse, coded, dense, quantise, relative_error, rotary, streams
from tests.kernels.compiler import LEVELS

DIM = 64
LENGTHS = [90, 0, 1, 700]
FORMATS = ["dense", "packed", "coded", "coupled", "weighed"]


def stored(name: str, rows: int) -> Rows:
    """Return random pairs in a format."""
    keys, values = torch.randn(2, rows, DIM)
    if name == "dense":
        return dense(keys, values)
    if name == "packed":
        return Rows(quantise(keys, 4, (32, 1))[0], quantise(values, 4, (1, 32))[0])
    coupled, bits = (4, 8) if name == "coupled" else (1, 4)
    weight = torch.randn(rows) if name == "weighed" else None
    return Rows(coded(rows, DIM, coupled, bits, books=4), coded(rows, DIM, coupled, bits, books=4), weight)


def with_offset(rows: Rows, s: Streams, turned: int = DIM, straight: bool = False, mixed: bool = False) -> Rows:
    """Return rows with an offset ten times their size; the halves of `mixed` channels are interleaved."""
    table = rotary(s, turned, length=1000)
    if straight:
        table = replace(table, positions=None, shift=5 - s.starts)
    order = torch.randperm(DIM) if mixed else None
    return replace(rows, key_offset=Offset(10 * torch.randn(len(s.lengths), DIM), table, order))


def added(rows: Rows, s: Streams) -> Rows:
    """Return the pairs in float32 with the offset added to their keys."""
    keys, values = torch.zeros(2, s.rows, DIM)
    for n, numbers in enumerate(s.where.numbers()):
        assert rows.key_offset is not None
        keys[numbers] = rows.keys.read(numbers, n) + rows.key_offset.rows(n, numbers)
        values[numbers] = rows.values.read(numbers, n)
    return Rows(Dense(keys), Dense(values), rows.log_weight)


@pytest.mark.parametrize("level", [None, *LEVELS])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("turned", "straight", "mixed"), [(64, True, False), (64, False, True), (32, False, False)])
def test_matches_keys_that_contain_it(name: str, turned: int, straight: bool, mixed: bool, level: str | None) -> None:
    s = streams(LENGTHS, 6, DIM)
    rows = with_offset(stored(name, s.rows), s, turned, straight, mixed)
    for options in (Options(0.05), Options(0.05, softcap=5.0), Options(0.05, causal=2)):
        expected = reference.decode(s.q, added(rows, s), s.where, options)
        for where in (s.where, s.listed()) if not options.causal else (s.where,):
            assert rows.key_offset is not None
            products = rows.key_offset.products(s.q, None)
            if level is None:
                out, lse = reference.decode(s.q, rows, where, options, products)
            else:
                out, lse = cpu.decode(s.q, rows, where, options, level, added=products)
            assert relative_error(out, expected[0]) < (1e-5 if level is None else 1e-3)
            assert_same_lse(lse, expected[1], 1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_streams_read_the_offset_of_their_owner(name: str) -> None:
    """Sets of queries in another order read the offset and the shift of their own stream."""
    s = streams(LENGTHS, 4, DIM)
    rows = with_offset(stored(name, s.rows), s)
    order = torch.tensor([3, 0, 3, 2])
    result, _ = decode(s.q, rows, Ranges(s.starts[order], s.lengths[order], order), Options(0.05))
    expected, _ = reference.decode(s.q, added(rows, s), Ranges(s.starts[order], s.lengths[order]), Options(0.05))
    assert relative_error(result, expected) < 1e-3


@pytest.mark.parametrize("listed", [False, True])
def test_many_products_are_made_for_some_streams_at_a_time(monkeypatch: pytest.MonkeyPatch, listed: bool) -> None:
    s = streams(LENGTHS, 4, DIM)
    rows = with_offset(stored("coded", s.rows), s)
    where = s.listed() if listed else s.where
    expected = decode(s.q, rows, where, Options(0.05))
    monkeypatch.setattr(dispatch, "MOST_PRODUCTS", 3 * 4 * 1024)
    for chunked, unchunked in zip(decode(s.q, rows, where, Options(0.05)), expected, strict=True):
        torch.testing.assert_close(chunked, unchunked)


def test_zeros_change_nothing() -> None:
    s = streams(LENGTHS, 4, DIM)
    rows = stored("packed", s.rows)
    offset = with_offset(rows, s).key_offset
    assert offset is not None
    zero = replace(rows, key_offset=replace(offset, centre=torch.zeros_like(offset.centre)))
    for result, expected in zip(
        decode(s.q, zero, s.where, Options(0.1)), decode(s.q, rows, s.where, Options(0.1)), strict=True
    ):
        assert torch.equal(result, expected)


def test_bad_offsets_are_refused() -> None:
    s = streams(LENGTHS, 4, DIM)
    rows = with_offset(stored("packed", s.rows), s)
    offset = rows.key_offset
    assert offset is not None
    few = replace(rows, key_offset=replace(offset, centre=offset.centre[:2]))
    with pytest.raises(ValueError, match=r"key_offset.centre must be .* \[4, 64\], got float32 \[2, 64\]"):
        decode(s.q, few, s.where, Options(0.1))
    thin = replace(rows, key_offset=replace(offset, centre=offset.centre[:, :32]))
    with pytest.raises(ValueError, match=r"key_offset.centre must be .* \[streams, 64\]"):
        decode(s.q, thin, s.where, Options(0.1))
    for name in ("packed", "coded"):
        beyond = with_offset(stored(name, s.rows), s)
        assert beyond.key_offset is not None
        table = replace(beyond.key_offset.rotary, shift=beyond.key_offset.rotary.shift + 10**6)
        beyond = replace(beyond, key_offset=replace(beyond.key_offset, rotary=table))
        with pytest.raises(ValueError, match=r"positions (without|outside)"):  # of the kernels, and of the reference
            decode(s.q, beyond, s.where, Options(0.1))
