# SPDX-License-Identifier: Apache-2.0
"""Rows chosen by labels without storing the scores, against scores and choice in two calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpress.kernels import Dense, Packed, Ranges, counters, label_rows, label_scores, reset_counters, top_rows
from kvpress.kernels.scores import cpu as scores_cpu
from kvpress.kernels.selection import cpu
from tests.kernels.builders import quantise, streams
from tests.kernels.compiler import LEVELS, needs_compiler

LENGTHS = [0, 1, 39, 40, 41, 63, 64, 65, 300, 4096, 5000]
WIDTH = 16


def labels_of(kind: str, rows: int) -> Dense | Packed:
    values = torch.randn(rows, WIDTH)
    if kind in ("int2", "int4"):
        return quantise(values, int(kind[3:]), (1, WIDTH))[0]
    return Dense(values.to(getattr(torch, kind)))


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["int2", "int4", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_every_level_chooses_as_from_scores_that_are_held(level: str, kind: str, reduce: str) -> None:
    dtype = torch.float32 if kind.startswith("int") else getattr(torch, kind)
    s = streams(LENGTHS, 5, WIDTH, dtype)
    labels = labels_of(kind, s.rows)
    scores = scores_cpu.score(s.q, None, labels, s.where, reduce, 5001, level)
    limits = torch.tensor([min(20 + 3 * n, 40) for n in range(len(LENGTHS))])
    for case in ((40, 0, 0, None), (40, 4, 9, None), (40, 4, 9, limits), (6000, 0, 0, None)):
        k, first, last, counts = case
        ours = cpu.choose_by_labels(s.q, labels, s.where, k, reduce, 5001, first, last, counts, level)
        assert all(map(torch.equal, ours, cpu.choose(scores, s.where, k, first, last, counts, level)))


@needs_compiler
def test_scores_are_held_where_there_are_more_threads_than_streams() -> None:
    s = streams([700, 900], 4, WIDTH)
    labels = labels_of("int4", s.rows)
    chosen, threads = [], torch.get_num_threads()
    for count, names in ((1, {"label_rows": 1}), (2, {"label_rows": 1}), (3, {"label_scores": 1, "top_rows": 1})):
        reset_counters()
        torch.set_num_threads(count)
        try:
            chosen.append(label_rows(s.q, labels, s.where, 50, first=4, last=2))
        finally:
            torch.set_num_threads(threads)
        assert counters() == names
    assert all(map(torch.equal, chosen[0], chosen[1]))
    assert all(map(torch.equal, chosen[0], chosen[2]))


@needs_compiler
def test_without_kernels_the_same_rows_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    s = streams([700, 900, 0], 4, WIDTH)
    labels = Dense(torch.randn(s.rows, WIDTH))
    fast = label_rows(s.q, labels, s.where, 50, capacity=1000)
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", "0")
    plain = label_rows(s.q, labels, s.where, 50, capacity=1000)
    assert all(map(torch.equal, fast, plain))
    scores = label_scores(s.q, labels, s.where, capacity=1000)
    assert all(map(torch.equal, plain, top_rows(scores, s.where, 50)))


BAD = {
    "k must be at least 1, got 0": {"k": 0},
    "at most 4 together, got 3 and 2": {"first": 3, "last": 2},
    "limits must be int64 \\[2\\]": {"limits": torch.tensor([3])},
    "reduce must be one of": {"reduce": "mean"},
    "stream 1 .* choose from first \\+ last to k": {"limits": torch.tensor([4, 5])},
    "stream 1 .* the 20 stored rows": {"starts": torch.tensor([0, 12])},
    "streams must have at most 8 entries, their capacity, got 9": {"capacity": 8},
    "q must": {"q": torch.zeros(2, 0, WIDTH)},
}


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    args: dict[str, Any] = {
        "q": torch.zeros(2, 3, WIDTH),
        "labels": Dense(torch.zeros(20, WIDTH)),
        "starts": torch.tensor([0, 9]),
        "lengths": torch.tensor([9, 9]),
        "k": 4,
    }
    args |= BAD[message]
    args["where"] = Ranges(args.pop("starts"), args.pop("lengths"))
    with pytest.raises(ValueError, match=message):
        label_rows(**args)
