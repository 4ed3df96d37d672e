# SPDX-License-Identifier: Apache-2.0
"""Choice of the rows with the largest scores against sorting one stream at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import Dense, Listed, Options, Ranges, counters, decode, label_scores, reset_counters, top_rows
from kvpress.kernels.selection import cpu, reference
from tests.kernels.builders import dense, streams
from tests.kernels.compiler import LEVELS, needs_compiler

INF, NAN = float("inf"), float("nan")
LENGTHS = [0, 1, 39, 40, 41, 63, 64, 65, 300, 5000]
FORCED = [(0, 0), (4, 0), (0, 9), (4, 9), (20, 20)]


def drawn(kind: str, lengths: list[int], capacity: int) -> Tensor:
    """Return scores of one kind; past the end of a stream they are the largest of all."""
    shape = (len(lengths), capacity)
    normal = torch.randn(shape)
    scores = {
        "normal": normal,
        "wide": normal * 10 ** torch.randint(-44, 38, shape).float(),
        "ties": (normal * 2).round(),
        "equal": torch.full(shape, -3.0),
        "zeros": torch.where(normal < 0, 0.0, -0.0),
        "ascending": torch.arange(capacity).float().expand(shape).clone(),
        "infinite": torch.where(normal < -1, -INF, torch.where(normal > 2, INF, normal)),
        "mostly minus infinity": torch.where(normal < 2.5, -INF, normal),
        "some NaN": torch.where(normal > 1, torch.where(normal > 1.5, NAN, -NAN), normal),
        "mostly NaN": torch.where(normal < 2.5, NAN, torch.where(normal < 2.6, -INF, normal)),
    }[kind]
    for n, length in enumerate(lengths):
        scores[n, length:] = INF
    return scores


KINDS = [
    "normal",
    "wide",
    "ties",
    "equal",
    "zeros",
    "ascending",
    "infinite",
    "mostly minus infinity",
    "some NaN",
    "mostly NaN",
]


def expected(scores: Tensor, start: int, length: int, k: int, first: int = 0, last: int = 0) -> list[int]:
    """Return the rows of one stream by sorting (NaN last, then larger score, then lower row)."""
    values = scores[:length].tolist()
    forced = {i for i in range(length) if i < first or i >= length - last}
    free = sorted(set(range(length)) - forced, key=lambda i: (values[i] != values[i], -values[i], i))
    return [start + i for i in sorted([*forced, *free[: max(0, k - len(forced))]])]


def assert_chosen(ours: tuple[Tensor, Tensor], scores: Tensor, starts: Tensor, lengths: Tensor, *args: int) -> None:
    rows, counts = ours
    assert rows.dtype == torch.int32
    assert rows.shape == (len(scores), min(args[0], scores.shape[1]))
    for n, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        best = expected(scores[n], start, length, *args)
        assert rows[n, : counts[n]].tolist() == best
        assert not rows[n, counts[n] :].any()


def placed(lengths: list[int]) -> tuple[Tensor, Tensor]:
    s = streams(lengths, 1, 8)
    return s.starts, s.lengths


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_level_chooses_the_largest(level: str, kind: str) -> None:
    starts, lengths = placed(LENGTHS)
    scores = drawn(kind, LENGTHS, 5001)
    for k, first, last in [(1, 0, 0), (300, 4, 9), (2000, 0, 0), (6000, 4, 0), *((40, *forced) for forced in FORCED)]:
        ours = cpu.choose(scores, Ranges(starts, lengths), k, first, last, None, level)
        assert_chosen(ours, scores, starts, lengths, k, first, last)


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_streams_may_choose_different_numbers(level: str | None) -> None:
    starts, lengths = placed(LENGTHS)
    scores, limits = drawn("ties", LENGTHS, 5001), torch.tensor([40, 13, 39, 13, 40, 13, 20, 30, 40, 17])
    args = (scores, Ranges(starts, lengths), 40, 4, 9, limits)
    rows, counts = cpu.choose(*args, level) if level else reference.choose(*args)
    assert counts.tolist() == torch.minimum(lengths, limits).tolist()
    for n, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        assert rows[n, : counts[n]].tolist() == expected(scores[n], start, length, int(limits[n]), 4, 9)
        assert not rows[n, counts[n] :].any()


@pytest.mark.parametrize("kind", KINDS)
def test_reference_chooses_the_largest(kind: str) -> None:
    starts, lengths = placed(LENGTHS)
    scores = drawn(kind, LENGTHS, 5001)
    for k, first, last in [(1, 0, 0), (40, 4, 9), (6000, 0, 0)]:
        ours = reference.choose(scores, Ranges(starts, lengths), k, first, last)
        assert_chosen(ours, scores, starts, lengths, k, first, last)


def test_chosen_scores_are_those_of_topk() -> None:
    starts, lengths = torch.tensor([7, 20000]), torch.tensor([20000, 20000])
    scores = torch.randn(2, 20000)
    rows, counts = top_rows(scores, Ranges(starts, lengths), 1250)
    assert counts.tolist() == [1250, 1250]
    chosen = scores.gather(1, rows.long() - starts[:, None])
    assert torch.equal(chosen.sort(dim=1, descending=True).values, scores.topk(1250, dim=1).values)


def test_threads_and_strides_do_not_matter() -> None:
    starts, lengths = placed(LENGTHS)
    wide = torch.full((len(LENGTHS), 6000), INF)
    wide[:, 100:5101] = drawn("ties", LENGTHS, 5001)
    scores = wide[:, 100:5101]
    contiguous = top_rows(scores.contiguous(), Ranges(starts, lengths), 40)
    torch.set_num_threads(2)
    assert all(map(torch.equal, top_rows(scores, Ranges(starts, lengths), 40), contiguous))


def test_nothing_to_choose_from() -> None:
    nothing = torch.zeros(2, dtype=torch.int64)
    rows, counts = top_rows(torch.zeros(2, 0), Ranges(nothing, nothing), 5, first=2, last=3)
    assert rows.shape == (2, 0)
    assert counts.tolist() == [0, 0]


def test_selection_with_room_for_all_pairs_is_dense_attention() -> None:
    s = streams([30, 0, 64], 4, 16)
    keys, values = torch.randn(2, s.rows, 16)
    rows, counts = top_rows(label_scores(s.q, Dense(keys), s.where), s.where, 64)
    out, _ = decode(s.q, dense(keys, values), Listed(rows, counts), Options(0.25))
    for n, (start, length) in enumerate(zip(s.starts, s.lengths, strict=True)):
        stream = slice(start, start + length)
        truth = torch.softmax(0.25 * s.q[n] @ keys[stream].T, dim=-1) @ values[stream]
        torch.testing.assert_close(out[n], truth)


@needs_compiler
def test_fast_path_is_counted_and_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    starts, lengths = placed(LENGTHS)
    scores = drawn("ties", LENGTHS, 5001)
    reset_counters()
    fast = top_rows(scores, Ranges(starts, lengths), 40, first=4, last=9)
    assert counters() == {"top_rows": 1}
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", "0")
    assert all(map(torch.equal, fast, top_rows(scores, Ranges(starts, lengths), 40, first=4, last=9)))
    assert counters() == {"top_rows": 1}


BAD = {
    "scores must be float32 \\[N, capacity\\]": {"scores": torch.zeros(2, 9, dtype=torch.float16)},
    "scores must be contiguous": {"scores": torch.zeros(9, 2).T},
    "starts must be int64 \\[2\\]": {"starts": torch.zeros(3, dtype=torch.int64)},
    "lengths must be int64 \\[2\\]": {"lengths": torch.zeros(2, dtype=torch.int32)},
    "k must be at least 1, got 0": {"k": 0},
    "at most 4 together, got 3 and 2": {"first": 3, "last": 2},
    "must not be negative.* got -1 and 0": {"first": -1},
    "stream 1 must have 0 to 9 rows": {"lengths": torch.tensor([9, 10])},
    "stream 0 must have 0 to 9 rows": {"lengths": torch.tensor([-1, 0])},
    "with numbers from 0 to 2147483647": {"starts": torch.tensor([0, 2**31 - 1]), "lengths": torch.tensor([0, 1])},
    "stream 0 must have .* with numbers from 0": {"starts": torch.tensor([-1, 0])},
    "limits must be int64 \\[2\\]": {"limits": torch.tensor([3])},
    "stream 1 .* choose from first \\+ last to k": {"limits": torch.tensor([4, 5])},
    "stream 0 .* choose from first": {"limits": torch.tensor([1, 4]), "first": 2},
}


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    args: dict[str, Any] = {
        "scores": torch.zeros(2, 9),
        "starts": torch.zeros(2, dtype=torch.int64),
        "lengths": torch.tensor([9, 9]),
        "k": 4,
    }
    args |= BAD[message]
    args["where"] = Ranges(args.pop("starts"), args.pop("lengths"))
    with pytest.raises(ValueError, match=message):
        top_rows(**args)
