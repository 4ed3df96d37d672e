# SPDX-License-Identifier: Apache-2.0
"""Page bounds and label scores against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import Dense, Packed, Ranges, counters, label_scores, page_bounds, reset_counters
from kvpress.kernels.scores import cpu, reference
from kvpress.kernels.scores.contract import LABEL_BITS
from tests.kernels.builders import Streams, quantise, quantise_centred, relative_error, streams
from tests.kernels.compiler import LEVELS, needs_compiler
from tests.pairwise import every_pair

LENGTHS = [0, 1, 17, 63, 300]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bounds(rows: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    a, b = torch.randn(2, rows, dim).to(dtype)
    return torch.minimum(a, b), torch.maximum(a, b)


def assert_close(ours: Tensor, expected: Tensor) -> None:
    assert torch.equal(ours.isneginf(), expected.isneginf())
    assert relative_error(ours.nan_to_num(neginf=0.0), expected.nan_to_num(neginf=0.0)) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 20, 64, 80, 128])
@pytest.mark.parametrize("queries", [1, 4, 7])
def test_bounds_match_reference(dtype: torch.dtype, dim: int, queries: int) -> None:
    s = streams(LENGTHS, queries, dim, dtype)
    low, high = bounds(s.rows, dim, dtype)
    ours = page_bounds(s.q, low, high, s.where)
    assert_close(ours, reference.score(s.q, Dense(low), Dense(high), s.where, "max", 300))
    elementwise = torch.maximum(
        s.q[4, :, None].float() * low[s.starts[4] :].float(), s.q[4, :, None].float() * high[s.starts[4] :].float()
    )
    assert_close(ours[4], elementwise.sum(-1).amax(0)[:300])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [4, 16, 32])
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_labels_match_reference(dtype: torch.dtype, width: int, reduce: str) -> None:
    s = streams(LENGTHS, 6, width, dtype)
    labels = torch.randn(s.rows, width).to(dtype)
    ours = label_scores(s.q, Dense(labels), s.where, reduce=reduce)
    assert_close(ours, reference.score(s.q, None, Dense(labels), s.where, reduce, 300))


def exact_scores(s: Streams, labels: Packed, values: Tensor, reduce: str) -> tuple[Tensor, Tensor]:
    """Return scores of quantised labels in float64 and the error that the contract allows; -inf and 0 past a stream."""
    zero, values = labels.zero.double(), values.double()
    sizes = (values - zero + zero.abs()).sum(1)
    exact = torch.full((len(s.lengths), int(s.lengths.max())), float("-inf"), dtype=torch.float64)
    allowed = torch.zeros_like(exact)
    for n, (start, length) in enumerate(zip(s.starts, s.lengths, strict=True)):
        rows = slice(start, start + length)
        q = s.q[n].double() if reduce == "max" else s.q[n].double().sum(0, keepdim=True)
        exact[n, :length] = (q @ values[rows].T).amax(0)
        allowed[n, :length] = 2**-15 * q.abs().max() * sizes[rows]
    return exact, allowed


@needs_compiler
@every_pair(
    level=LEVELS,
    bits=LABEL_BITS,
    problem=[(16, 4, 1), (8, 1, 0), (32, 7, 2), (40, 3, 0), (128, 12, 1)],
    reduce=["max", "sum"],
)
def test_quantised_labels_keep_their_error_bound(
    level: str, bits: int, problem: tuple[int, int, int], reduce: str
) -> None:
    width, queries, dtype = problem
    s = streams([*LENGTHS, 1000], queries, width, DTYPES[dtype])
    s.q[2] = 0
    x = torch.randn(s.rows, width) + torch.randn(s.rows, 1)
    x[40:60] = 1.5  # labels with equal channels have scale 0
    labels, values = quantise(x, bits, (1, width), torch.float32 if dtype == 0 else torch.float16)
    ours = cpu.score(s.q, None, labels, s.where, reduce, 1000, level).double()
    exact, allowed = exact_scores(s, labels, values, reduce)
    assert torch.equal(ours.isneginf(), exact.isneginf())
    assert ((ours - exact).abs().nan_to_num(nan=0.0) <= allowed).all()


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", LABEL_BITS)
def test_labels_with_a_zero_point_need_no_zeros(level: str, bits: int) -> None:
    s = streams([*LENGTHS, 1000], 4, 16)
    labels, values = quantise_centred(torch.randn(s.rows, 16), bits)
    ours = cpu.score(s.q, None, labels, s.where, "max", 1000, level)
    expected = reference.score(s.q, None, Dense(values), s.where, "max", 1000)
    assert torch.equal(ours.isneginf(), expected.isneginf())
    assert relative_error(ours.nan_to_num(neginf=0.0), expected.nan_to_num(neginf=0.0)) < 2**-12


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
def test_products_of_wide_labels_do_not_overflow(level: str) -> None:
    labels = Packed(torch.full((70, 1024), 255, dtype=torch.uint8), *torch.ones(2, 70, 1), 8, (1, 1024))
    q, starts, lengths = torch.full((1, 2, 1024), 3.0), torch.zeros(1, dtype=torch.int64), torch.tensor([70])
    ours = cpu.score(q, None, labels, Ranges(starts, lengths), "max", 70, level)
    assert relative_error(ours, torch.full((1, 70), 256 * 3.0 * 1024)) < 2**-12


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_quantised_labels_score_as_they_decode(kernels: str, reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    s = streams(LENGTHS, 6, 16)
    labels, values = quantise(torch.randn(s.rows, 16), 4, (1, 16))
    ours = label_scores(s.q, labels, s.where, reduce=reduce, capacity=320)
    decoded = label_scores(s.q, Dense(values), s.where, reduce=reduce, capacity=320)
    assert torch.equal(ours.isneginf(), decoded.isneginf())
    assert relative_error(ours[:, :300].nan_to_num(neginf=0.0), decoded[:, :300].nan_to_num(neginf=0.0)) < 2**-13


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("labels", "reduce"), [(False, "max"), (True, "max"), (True, "sum")])
def test_every_level_agrees(level: str, dtype: torch.dtype, labels: bool, reduce: str) -> None:
    s = streams([*LENGTHS, 1000], 6, 36, dtype)
    low, high = bounds(s.rows, 36, dtype)
    args = (s.q, None if labels else Dense(low), Dense(high), s.where, reduce, 1000)
    assert_close(cpu.score(*args, level), reference.score(*args))


def test_no_logit_exceeds_the_bound_of_its_page() -> None:
    s = streams([5, 9], 4, 32)
    keys = torch.randn(s.rows, 16, 32)
    bound = page_bounds(s.q, keys.amin(1), keys.amax(1), s.where)
    for n, (start, length) in enumerate(zip(s.starts, s.lengths, strict=True)):
        logits = torch.einsum("md,psd->mps", s.q[n], keys[start : start + length])
        assert (logits.amax((0, 2)) <= bound[n, :length] + 1e-4).all()


def test_strided_and_unused_rows_do_not_matter() -> None:
    s = streams([40, 0, 300], 4, 64, torch.bfloat16)
    wide = torch.full((s.rows, 200), float("nan"), dtype=torch.bfloat16)
    for start, length in zip(s.starts, s.lengths, strict=True):
        wide[start : start + length] = torch.randn(int(length), 200).bfloat16()
    low, high = wide[:, :64], wide[:, 100:164]
    ours = page_bounds(s.q, low, high, s.where)
    assert_close(ours, reference.score(s.q, Dense(low), Dense(high), s.where, "max", 300))


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_capacity_fixes_the_width_of_the_result(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    s = streams(LENGTHS, 3, 16)
    rows = torch.randn(s.rows, 16)
    free, fixed = (label_scores(s.q, Dense(rows), s.where, capacity=capacity) for capacity in (None, 320))
    assert torch.equal(fixed[:, :300], free)
    assert fixed[:, 300:].isneginf().all()
    with pytest.raises(ValueError, match="streams must have at most 299 entries, their capacity, got 300"):
        page_bounds(s.q, rows, rows, s.where, capacity=299)


def test_streams_without_rows() -> None:
    nothing = torch.zeros(2, dtype=torch.int64)
    rows = torch.zeros(0, 8)
    assert page_bounds(torch.zeros(2, 1, 8), rows, rows, Ranges(nothing, nothing)).shape == (2, 0)


@needs_compiler
def test_fast_path_is_counted_and_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    s = streams([40, 50], 2, 64)
    low, high = bounds(s.rows, 64, torch.float32)
    reset_counters()
    fast = page_bounds(s.q, low, high, s.where)
    scores = label_scores(s.q, Dense(high), s.where)
    assert counters() == {"page_bounds": 1, "label_scores": 1}
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", "0")
    assert_close(fast, page_bounds(s.q, low, high, s.where))
    assert_close(scores, label_scores(s.q, Dense(high), s.where))
    assert counters() == {"page_bounds": 1, "label_scores": 1}


BAD = {
    "q must be": {"q": torch.zeros(2, 4, 8, dtype=torch.int32)},
    "q must hold at least one query": {"q": torch.zeros(2, 0, 8)},
    "high must be .* 8\\], got float32 \\[20, 9\\]": {"high": torch.zeros(20, 9)},
    "high must be contiguous": {"high": torch.zeros(8, 20).T},
    "low must be float32 \\[20, 8\\]": {"low": torch.zeros(19, 8)},
    "low must be laid out like high": {"low": torch.zeros(20, 9)[:, :8]},
    "starts must be int64 \\[2\\]": {"starts": torch.zeros(3, dtype=torch.int64)},
    "stream 1 ": {"lengths": torch.tensor([1, 21])},
    "stream 0 ": {"starts": torch.tensor([-1, 0])},
}


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    args: dict[str, Any] = {
        "low": torch.zeros(20, 8),
        "high": torch.zeros(20, 8),
        "q": torch.zeros(2, 4, 8),
        "starts": torch.zeros(2, dtype=torch.int64),
        "lengths": torch.zeros(2, dtype=torch.int64),
    }
    args |= BAD[message]
    where = Ranges(args.pop("starts"), args.pop("lengths"))
    with pytest.raises(ValueError, match=message):
        page_bounds(**args, where=where)


def test_an_unknown_reduction_is_named() -> None:
    nothing = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="reduce must be one of \\['max', 'sum'\\], got 'mean'"):
        label_scores(torch.zeros(1, 1, 8), Dense(torch.zeros(3, 8)), Ranges(nothing, nothing), reduce="mean")


BAD_CODES = {
    "labels.codes must be uint8 \\[20, 4\\]": {"codes": torch.zeros(20, 8, dtype=torch.uint8)},
    "labels.group must be \\(1, 8\\), one scale for each label, got \\(1, 4\\)": {
        "scale": torch.zeros(20, 2),
        "zero": torch.zeros(20, 2),
        "group": (1, 4),
    },
    "labels.scale must be .* \\[20, 1\\]": {"scale": torch.zeros(19, 1)},
    "labels.bits must be one of \\(1, 2, 4, 8\\), got 3": {"bits": 3, "codes": torch.zeros(20, 3, dtype=torch.uint8)},
}


@pytest.mark.parametrize("message", BAD_CODES)
def test_bad_codes_are_named(message: str) -> None:
    codes, scale = torch.zeros(20, 4, dtype=torch.uint8), torch.zeros(20, 1)
    parts: dict[str, Any] = {"codes": codes, "scale": scale, "zero": scale, "bits": 4, "group": (1, 8)}
    nothing = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        label_scores(torch.zeros(2, 4, 8), Packed(**(parts | BAD_CODES[message])), Ranges(nothing, nothing))
