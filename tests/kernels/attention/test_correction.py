# SPDX-License-Identifier: Apache-2.0
"""Corrections of quantised rows: decode attention against float32 attention over the corrected rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import Correction, Listed, Options, Packed, Ranges, Rows, Where, decode
from kvpress.kernels.attention import cpu, reference
from tests.kernels.builders import assert_same_lse, correction, dense, quantise, relative_error, streams
from tests.kernels.compiler import LEVELS, needs_compiler

LENGTHS = [0, 1, 17, 63, 129, 600]
LIMIT = 1e-3


def corrected(keys: Packed, values: Packed, key_terms: Correction | None, value_terms: Correction | None) -> Rows:
    return Rows(replace(keys, correction=key_terms), replace(values, correction=value_terms))


def test_dense_sums_the_terms_of_the_listed_rows() -> None:
    terms, exact = correction(200, 48, 3, 0.1)
    for rows in (torch.randperm(200), torch.arange(5, 9), torch.zeros(0, dtype=torch.int64), torch.tensor([7, 7])):
        assert torch.allclose(terms.dense(rows, 48), exact[rows], atol=1e-5)
    assert torch.equal(Correction().dense(torch.arange(3), 8), torch.zeros(3, 8))


@pytest.mark.parametrize(("rank", "density"), [(1, 0), (2, 0.02), (4, 0.05), (7, 0), (16, 0.3), (0, 0.02)])
@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (80, 80), (96, 128), (128, 96), (256, 256)])
@pytest.mark.parametrize("queries", [1, 4, 7])
def test_matches_attention_over_corrected_rows(
    rank: int, density: float, dim: int, value_dim: int, queries: int
) -> None:
    s = streams(LENGTHS, queries, dim)
    keys, exact_keys = quantise(torch.randn(s.rows, dim), 2, (32, 1))
    values, exact_values = quantise(torch.randn(s.rows, value_dim), 4, (1, 16))
    key_terms, key_sum = correction(s.rows, dim, rank, density)
    value_terms, value_sum = correction(s.rows, value_dim, rank, density, chunk_rows=200)
    out, lse = decode(s.q, corrected(keys, values, key_terms, value_terms), s.where, Options(dim**-0.5))
    exact = dense(exact_keys + key_sum, exact_values + value_sum)
    expected, expected_lse = reference.decode(s.q, exact, s.where, Options(dim**-0.5))
    assert relative_error(out, expected) < LIMIT
    assert_same_lse(lse, expected_lse, LIMIT)


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("groups", [((32, 1), (1, 32)), ((8, 64), (4, 1))])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("listed", [False, True])
def test_every_level_and_option_agrees(
    level: str, groups: tuple[tuple[int, int], tuple[int, int]], dtype: torch.dtype, listed: bool
) -> None:
    s = streams([0, 5, 1100], 6, 64)
    keys, _ = quantise(torch.randn(s.rows, 64), 2, groups[0])
    values, _ = quantise(torch.randn(s.rows, 96), 3, groups[1])
    terms = (
        correction(s.rows, 64, 3, 0.05, 100, dtype)[0],
        correction(s.rows, 96, 5, 0.05, 7, dtype)[0],
    )
    rows = replace(corrected(keys, values, *terms), log_weight=torch.randn(s.rows))
    where: Where = s.where
    if listed:
        numbers = torch.stack([torch.randperm(s.rows)[:400] for _ in range(3)])
        where = Listed(numbers, torch.tensor([400, 0, 77]))
    args = (s.q, rows, where, Options(0.125, softcap=4.0, causal=0 if listed else 3))
    out, lse = cpu.decode(*args, level=level)
    expected, expected_lse = reference.decode(*args)
    assert relative_error(out, expected) < LIMIT
    assert_same_lse(lse, expected_lse, LIMIT)


def restore_low_rank(lost: Tensor) -> Correction:
    """Return the lost values as factors, with unit vectors as the basis."""
    rows, dim = lost.shape
    return Correction(lost, torch.eye(dim)[None], torch.zeros(rows, dtype=torch.int32))


def restore_outliers(lost: Tensor) -> Correction:
    """Return every channel as an outlier."""
    rows, dim = lost.shape
    first = torch.arange(rows + 1, dtype=torch.int32) * dim
    return Correction(None, None, None, first, torch.arange(dim, dtype=torch.uint8).repeat(rows), lost.flatten())


@pytest.mark.parametrize(("restore", "dim"), [(restore_low_rank, 16), (restore_outliers, 64), (restore_outliers, 256)])
def test_a_full_correction_gives_attention_over_the_original_rows(restore: Any, dim: int) -> None:
    s = streams(LENGTHS, 4, dim)
    original_keys, original_values = torch.randn(s.rows, dim), torch.randn(s.rows, dim)
    keys, decoded_keys = quantise(original_keys, 2, (32, 1))
    values, decoded_values = quantise(original_values, 2, (1, 16))
    key_terms, value_terms = restore(original_keys - decoded_keys), restore(original_values - decoded_values)
    rows = torch.stack([torch.randperm(s.rows)[:200] for _ in LENGTHS])
    counts = torch.tensor([0, 1, 3, 50, 127, 200])
    where = Listed(rows, counts)
    out, lse = decode(s.q, corrected(keys, values, key_terms, value_terms), where, Options(0.2))
    expected, expected_lse = reference.decode(s.q, dense(original_keys, original_values), where, Options(0.2))
    assert relative_error(out, expected) < LIMIT
    assert_same_lse(lse, expected_lse, LIMIT)


def test_rows_that_are_not_attended_to_may_refer_to_nothing_and_results_repeat() -> None:
    s = streams([40, 0, 1300], 4, 64)
    keys, _ = quantise(torch.randn(s.rows, 64), 4, (1, 64))
    values, _ = quantise(torch.randn(s.rows, 64), 4, (1, 32))
    terms, _ = correction(s.rows, 64, 2, 0)
    assert terms.chunk is not None
    rows = corrected(keys, values, terms, terms)
    clean = reference.decode(s.q, rows, s.where, Options(0.1))
    terms.chunk[s.unused()] = -1
    results = []
    for threads in (1, 2, 1):
        torch.set_num_threads(threads)
        results.append(decode(s.q, rows, s.where, Options(0.1)))
    assert relative_error(results[0][0], clean[0]) < LIMIT
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


def broken(field: str, value: int, at: int) -> Correction:
    terms, _ = correction(90, 64, 2, 0.05)
    fields = dict(vars(terms))
    fields[field] = fields[field].clone()
    fields[field][at] = value
    return Correction(**fields)


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize(
    ("field", "value"), [("chunk", 3), ("chunk", -1), ("first", -1), ("first", 10**6), ("channel", 64)]
)
def test_ids_must_exist(field: str, value: int, side: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    keys, _ = quantise(torch.randn(90, 64), 2, (32, 1))
    values, _ = quantise(torch.randn(90, 64), 2, (1, 32))
    starts, lengths = torch.tensor([0, 3]), torch.tensor([2, 80])
    terms = {"key_terms": None, "value_terms": None} | {f"{side}_terms": broken(field, value, 60)}
    with pytest.raises(ValueError, match="stream 1 refers to"):
        decode(torch.randn(2, 3, 64), corrected(keys, values, **terms), Ranges(starts, lengths), Options(1.0))


@needs_compiler
def test_no_outliers_is_no_correction() -> None:
    s = streams(LENGTHS, 4, 64)
    keys, _ = quantise(torch.randn(s.rows, 64), 2, (32, 1))
    values, _ = quantise(torch.randn(s.rows, 64), 2, (1, 32))
    first, channel = torch.zeros(s.rows + 1, dtype=torch.int32), torch.zeros(0, dtype=torch.uint8)
    nothing = Correction(first=first, channel=channel, delta=torch.zeros(0))
    plainly = decode(s.q, Rows(keys, values), s.where, Options(0.1))
    for terms in (Correction(), nothing):
        ours = decode(s.q, corrected(keys, values, terms, terms), s.where, Options(0.1))
        assert all(torch.equal(a, b) for a, b in zip(ours, plainly, strict=True))


def good() -> dict[str, Tensor]:
    return {
        "factor": torch.zeros(40, 2),
        "basis": torch.zeros(3, 2, 16),
        "chunk": torch.zeros(40, dtype=torch.int32),
        "first": torch.zeros(41, dtype=torch.int32),
        "channel": torch.zeros(5, dtype=torch.uint8),
        "delta": torch.zeros(5),
    }


BAD: dict[str, dict[str, Tensor | None]] = {
    "needs factor, basis and chunk together, got 2": {"basis": None},
    "needs first, channel and delta together, got 1": {"first": None, "channel": None},
    "keys.correction.factor must be float16/float32 \\[40, rank\\]": {"factor": torch.zeros(39, 2)},
    "keys.correction.factor must have a rank in \\[1, 16\\], got 17": {"factor": torch.zeros(40, 17)},
    "keys.correction.basis must be float32 \\[C, 2, 16\\], got float16": {"basis": torch.zeros(3, 2, 16).half()},
    "keys.correction.chunk must be int32 \\[40\\], got int64": {"chunk": torch.zeros(40, dtype=torch.int64)},
    "keys.correction.first must be int32 \\[41\\], got int32 \\[40\\]": {"first": torch.zeros(40, dtype=torch.int32)},
    "keys.correction.channel must be uint8 \\[E\\]": {"channel": torch.zeros(5, dtype=torch.int64)},
    "keys.correction.delta must be float16/float32 \\[5\\], got float32 \\[4\\]": {"delta": torch.zeros(4)},
    "keys.correction must be contiguous": {"factor": torch.zeros(2, 40).T},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_corrections_are_named(message: str) -> None:
    keys, _ = quantise(torch.randn(40, 16), 4, (32, 1))
    values, _ = quantise(torch.randn(40, 16), 4, (1, 16))
    where = Ranges(torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.int64))

    def attend() -> None:
        terms = Correction(**(good() | BAD[message]))
        decode(torch.zeros(1, 2, 16), corrected(keys, values, terms, None), where, Options(1.0))

    with pytest.raises(ValueError, match=message):
        attend()
