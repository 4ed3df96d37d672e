# SPDX-License-Identifier: Apache-2.0
"""Column statistics of softmax against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import Options, Ranges, Rows, column_mass, column_max, counters, quantise, reset_counters
from kvpress.kernels.mass import cpu, reference
from tests.kernels.builders import dense, relative_error, streams
from tests.kernels.compiler import LEVELS, needs_compiler
from tests.pairwise import every_pair

LENGTHS = [0, 1, 17, 63, 129, 300]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@every_pair(dtype=DTYPES, dim=[20, 33, 64, 80, 128, 256], queries=[(1, 1), (4, 3), (5, 2), (4, 64)])
def test_matches_reference(dtype: torch.dtype, dim: int, queries: tuple[int, int]) -> None:
    group, tokens = queries
    s = streams(LENGTHS, group * tokens, dim, dtype)
    keys = torch.randn(s.rows, dim).to(dtype)
    args = (s.q, dense(keys, keys), s.where, Options(dim**-0.5, causal=tokens))
    assert relative_error(column_mass(*args), reference.receive(*args, "sum")) < 1e-5


def options(name: str, streams: int, queries: int) -> tuple[Options, dict[str, Tensor]]:
    """Return options of the logits, and arrays per query."""
    rows = (streams, queries)
    return {
        "plain": (Options(0.2), {}),
        "lse": (Options(0.2), {"lse": 3 + torch.randn(rows)}),
        "softcap": (Options(0.2, softcap=2.0), {}),
        "causal": (Options(0.2, causal=39), {}),
        "sinks": (Options(0.2, causal=39, sinks=torch.randn(rows)), {}),
        "weights": (Options(0.2), {"query_weight": torch.rand(rows) * (torch.rand(rows) > 0.5)}),
        "log_weight": (Options(0.2, softcap=2.0, causal=39), {}),
    }[name]


@needs_compiler
@every_pair(
    level=LEVELS,
    dtype=DTYPES,
    name=["plain", "lse", "softcap", "causal", "sinks", "weights", "log_weight"],
    statistic=["sum", "squares", "max"],
)
def test_every_level_option_and_statistic_agrees(level: str, dtype: torch.dtype, name: str, statistic: str) -> None:
    s = streams([*LENGTHS, 2], 78, 80, dtype)
    keys = torch.randn(s.rows, 80).to(dtype)
    logits, arrays = options(name, 7, 78)
    log_weight = torch.randn(s.rows) if name == "log_weight" else None
    args = (s.q, dense(keys, keys, log_weight), s.where, logits, statistic)
    assert relative_error(cpu.receive(*args, **arrays, level=level), reference.receive(*args, **arrays)) < 1e-5


def test_public_names_pick_their_statistic() -> None:
    s = streams([70], 8, 16)
    keys = torch.randn(s.rows, 16)
    args = (s.q, dense(keys, keys), s.where, Options(0.2))
    weights = torch.softmax(s.q[0] @ keys[3:73].T * 0.2, dim=-1)
    for ours, expected in (
        (column_mass(*args), weights.sum(0)),
        (column_mass(*args, power=2), weights.square().sum(0)),
        (column_max(*args), weights.amax(0)),
    ):
        assert relative_error(ours[3:73], expected) < 1e-5
        assert not ours[:3].any()
        assert not ours[73:].any()


def test_mass_adds_up_to_the_number_of_queries() -> None:
    s = streams([300, 40], 12, 64, torch.bfloat16)
    keys = torch.randn(s.rows, 64).bfloat16()
    mass = column_mass(s.q, dense(keys, keys), s.where, Options(0.1, causal=12))
    assert abs(float(mass.sum()) - 24) < 1e-3


def test_huge_and_tiny_logits() -> None:
    s = streams([200], 8, 32)
    for scale in (0.0, -0.3, 60.0):
        keys = torch.randn(s.rows, 32)
        args = (s.q, dense(keys, keys), s.where, Options(scale))
        # Logits of several hundred have an error of 1e-5, and so do their exponentials.
        assert relative_error(column_mass(*args), reference.receive(*args, "sum")) < 3e-4


def test_strided_rows_and_unused_rows_do_not_matter() -> None:
    s = streams([40, 0, 300], 4, 64, torch.bfloat16)
    wide = torch.full((s.rows, 100), float("nan"), dtype=torch.bfloat16)
    for start, length in zip(s.starts, s.lengths, strict=True):
        wide[start : start + length, 10:74] = torch.randn(int(length), 64).bfloat16()
    args = (s.q, dense(wide[:, 10:74], wide[:, 10:74]), s.where, Options(0.1))
    assert relative_error(column_mass(*args), reference.receive(*args, "sum")) < 1e-5


def test_result_does_not_depend_on_threads() -> None:
    s = streams([900, 1, 511], 300, 32, torch.bfloat16)
    keys = torch.randn(s.rows, 32).bfloat16()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(column_mass(s.q, dense(keys, keys), s.where, Options(0.1, causal=100)))
    torch.set_num_threads(1)
    assert all(torch.equal(mass, results[0]) for mass in results)


@needs_compiler
def test_fast_path_is_counted_and_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    s = streams([40, 50], 2, 64)
    keys = torch.randn(s.rows, 64)
    args = (s.q, dense(keys, keys), s.where, Options(0.1))
    reset_counters()
    fast, _ = column_mass(*args), column_max(*args)
    assert counters() == {"column_mass": 1, "column_max": 1}
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", "0")
    assert relative_error(fast, column_mass(*args)) < 1e-5
    assert counters() == {"column_mass": 1, "column_max": 1}


BAD = {
    "q must be": {"q": torch.zeros(2, 4, 8, dtype=torch.int32)},
    "keys must be .* 8\\], got float32 \\[20, 9\\]": {"keys": torch.zeros(20, 9)},
    "keys must be contiguous": {"keys": torch.zeros(8, 20).T},
    "starts must be int64 \\[2\\]": {"starts": torch.zeros(3, dtype=torch.int64)},
    "stream 1 ": {"lengths": torch.tensor([1, 21])},
    "stream 0 ": {"starts": torch.tensor([-1, 0])},
    "streams must not share rows, but stream 1": {"lengths": torch.tensor([5, 2]), "starts": torch.tensor([0, 4])},
    "softcap must be positive or None, got 0.0": {"softcap": 0.0},
    "causal must be 0 or divide the 4 query rows, got 3": {"causal": 3},
    "lse must be float32 \\[2, 4\\]": {"lse": torch.zeros(2, 3)},
    "sinks must be float32 \\[2, 4\\]": {"sinks": torch.zeros(2)},
    "sinks must not be given with lse": {"sinks": torch.zeros(2, 4), "lse": torch.zeros(2, 4)},
    "query_weight must be float32 \\[2, 4\\]": {"query_weight": torch.zeros(2, 4).bool()},
    "log_weight must be float32/float16 \\[20\\]": {"log_weight": torch.zeros(2)},
    "power must be 1 or 2, got 3": {"power": 3},
}


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    args: dict[str, Any] = {
        "q": torch.zeros(2, 4, 8),
        "keys": torch.zeros(20, 8),
        "starts": torch.zeros(2, dtype=torch.int64),
        "lengths": torch.zeros(2, dtype=torch.int64),
        "scale": 1.0,
    }
    args |= BAD[message]
    where = Ranges(args.pop("starts"), args.pop("lengths"))
    rows = dense(args["keys"], args.pop("keys"), args.pop("log_weight", None))
    logits = Options(**{name: args.pop(name) for name in ("scale", "softcap", "causal", "sinks") if name in args})
    with pytest.raises(ValueError, match=message):
        column_mass(args.pop("q"), rows, where, logits, **args)


def test_keys_are_dense() -> None:
    s, packed = streams([4], 2, 8), quantise(torch.zeros(10, 8), 4, (1, 8))
    with pytest.raises(TypeError, match="keys must be dense, got packed keys"):
        column_max(s.q, Rows(packed, packed), s.where, Options(1.0))
