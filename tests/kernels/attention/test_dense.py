# SPDX-License-Identifier: Apache-2.0
"""Dense decode attention against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import Dense, Listed, Options, Ranges, Rows, counters, decode, quantise, reset_counters
from kvpress.kernels.attention import cpu, reference
from tests.kernels.builders import Streams, assert_same_lse, dense, relative_error, streams
from tests.kernels.compiler import LEVELS, needs_compiler

LENGTHS = [0, 1, 17, 63, 129, 300]
HALF = [torch.bfloat16, torch.float16]


def storage(s: Streams, dim: int, value_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(s.rows, dim).to(dtype), torch.randn(s.rows, value_dim).to(dtype)


def low_precision(s: Streams, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Return the result of torch in the storage type: the yardstick of the tolerance."""
    out = torch.zeros(*s.q.shape[:2], values.shape[1])
    for n, rows in enumerate(s.where.numbers()):
        if len(rows):
            weights = torch.softmax((s.q[n] @ keys[rows].T).float() * scale, dim=-1).to(values.dtype)
            out[n] = (weights @ values[rows]).float()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize(
    ("dim", "value_dim"), [(64, 64), (80, 80), (96, 64), (128, 128), (192, 128), (256, 256), (20, 36)]
)
@pytest.mark.parametrize(("group", "tokens"), [(1, 1), (4, 1), (4, 3), (16, 1), (5, 2)])
def test_matches_reference(dtype: torch.dtype, dim: int, value_dim: int, group: int, tokens: int) -> None:
    s = streams(LENGTHS, group * tokens, dim, dtype)
    keys, values = storage(s, dim, value_dim, dtype)
    scale = dim**-0.5
    rows = dense(keys, values)
    out, lse = decode(s.q, rows, s.where, Options(scale))
    expected, expected_lse = reference.decode(s.q, rows, s.where, Options(scale))
    bound = 2 * (low_precision(s, keys, values, scale) - expected).abs().max() + 1e-6 * expected.abs().max()
    assert (out - expected).abs().max() <= bound
    assert_same_lse(lse, expected_lse, 1e-5)


def options(name: str, rows: int) -> dict[str, Any]:
    weights = {"log_weight": torch.randn(rows)}
    return {"plain": {}, "softcap": {"softcap": 2.0}, "log_weight": weights, "causal": {"causal": 3}}[name]


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", ["plain", "softcap", "log_weight", "causal"])
def test_every_level_and_option_agrees(level: str, dtype: torch.dtype, name: str) -> None:
    s = streams([*LENGTHS, 2, 2500], 6, 80, dtype)
    keys, values = storage(s, 80, 100, dtype)
    kwargs = options(name, s.rows)
    args = (s.q, dense(keys, values, kwargs.pop("log_weight", None)), s.where, Options(0.3, **kwargs))
    out, lse = cpu.decode(*args, level=level)
    expected, expected_lse = reference.decode(*args)
    assert relative_error(out, expected) < 3e-6
    assert_same_lse(lse, expected_lse, 1e-5)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_select_matches_reference(index: torch.dtype) -> None:
    s = streams([400] * 4, 8, 128, torch.bfloat16)
    keys, values = storage(s, 128, 64, torch.bfloat16)
    rows = torch.stack([torch.randperm(s.rows)[:200] for _ in range(4)]).to(index)
    counts = torch.tensor([200, 0, 1, 77])
    args = (s.q, dense(keys, values, torch.randn(s.rows)), Listed(rows, counts), Options(0.1, softcap=3.0))
    out, lse = decode(*args)
    expected, expected_lse = reference.decode(*args)
    assert relative_error(out, expected) < 3e-6
    assert_same_lse(lse, expected_lse, 1e-5)


@needs_compiler
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_lists_without_a_place_read_nothing(index: torch.dtype) -> None:
    s = streams([40] * 3, 4, 64, torch.bfloat16)
    keys, values = storage(s, 64, 32, torch.bfloat16)
    rows, counts = torch.empty(3, 0, dtype=index), torch.zeros(3, dtype=torch.int64)
    out, lse = decode(s.q, dense(keys, values), Listed(rows, counts), Options(0.1))
    assert torch.equal(out, torch.zeros(3, 4, 32))
    assert bool(lse.isneginf().all())
    with pytest.raises(ValueError, match="rows outside the"):
        decode(s.q, dense(keys, values), Listed(rows, counts + 1), Options(0.1))


def test_strided_rows_and_unused_rows_do_not_matter() -> None:
    s = streams([40, 0, 300], 4, 64, torch.bfloat16)
    wide = torch.full((s.rows, 160), float("nan"), dtype=torch.bfloat16)
    used = torch.cat(s.where.numbers())
    wide[used, :144] = torch.randn(len(used), 144).bfloat16()
    keys, values = wide[:, :64], wide[:, 64:144]
    args = (s.q, dense(keys, values), s.where, Options(0.1))
    out, lse = decode(*args)
    expected, expected_lse = reference.decode(*args)
    assert relative_error(out, expected) < 3e-6
    assert_same_lse(lse, expected_lse, 1e-5)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 30.0])
def test_unusual_scales(scale: float) -> None:
    s = streams([100, 1500], 2, 64)
    keys, values = storage(s, 64, 64, torch.float32)
    rows = dense(keys, values)
    out, lse = decode(s.q, rows, s.where, Options(scale))
    expected, expected_lse = reference.decode(s.q, rows, s.where, Options(scale))
    assert relative_error(out, expected) < 1e-4
    assert_same_lse(lse, expected_lse, 1e-3)


@needs_compiler
def test_pieces_of_several_lengths_are_merged_for_any_number_of_threads() -> None:
    # A piece is a 64th of the remaining rows: of 3 * 1024 at first, of 1024 at last.
    s = streams([150_000, 1, 30_000, 60_001], 3, 16)
    keys, values = storage(s, 16, 16, torch.float32)
    rows, options = dense(keys, values), Options(0.5)
    expected = reference.decode(s.q, rows, s.where, options)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(decode(s.q, rows, s.where, options))
    torch.set_num_threads(1)
    assert all(map(torch.equal, *results))
    torch.testing.assert_close(results[0][0], expected[0], atol=2e-6, rtol=1e-5)
    assert_same_lse(results[0][1], expected[1], 1e-5)


def test_result_does_not_depend_on_threads_or_repetition() -> None:
    s = streams([3000, 1, 2049], 4, 128, torch.bfloat16)
    keys, values = storage(s, 128, 128, torch.bfloat16)
    results = []
    for threads in (1, 2, 3, 1):
        torch.set_num_threads(threads)
        results.append(decode(s.q, dense(keys, values), s.where, Options(0.1)))
    torch.set_num_threads(1)
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


def test_streams_split_anywhere_merge_to_the_same() -> None:
    s = streams([500], 4, 64)
    keys, values = storage(s, 64, 64, torch.float32)
    rows = dense(keys, values)
    unsplit, _ = decode(s.q, rows, s.where, Options(0.1))
    starts, lengths = s.starts + torch.tensor([0, 123, 123]), torch.tensor([123, 0, 377])
    parts, lse = decode(s.q.expand(3, -1, -1), rows, Ranges(starts, lengths), Options(0.1))
    merged = (lse.softmax(0)[..., None] * parts).sum(0)
    assert relative_error(merged, unsplit[0]) < 3e-6


@needs_compiler
def test_fast_path_is_counted_and_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    s = streams([40, 50], 2, 64)
    keys, values = storage(s, 64, 64, torch.float32)
    args = (s.q, dense(keys, values), s.where, Options(0.1))
    reset_counters()
    fast, _ = decode(*args)
    assert counters() == {"dense_decode": 1}
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", "0")
    slow, _ = decode(*args)
    assert counters() == {"dense_decode": 1}
    assert relative_error(fast, slow) < 3e-6


BAD = {
    "q must be": {"q": torch.zeros(2, 4, 8, dtype=torch.int32)},
    "keys must be .* 8\\], got float32 \\[20, 9\\]": {"keys": torch.zeros(20, 9)},
    "values must be .* \\[20, Dv\\]": {"values": torch.zeros(19, 8)},
    "values must be torch.float32 like keys": {"values": torch.zeros(20, 8).half()},
    "keys must be contiguous": {"keys": torch.zeros(8, 20).T},
    "starts must be int64 \\[2\\]": {"starts": torch.zeros(3, dtype=torch.int64)},
    "lengths must be int64": {"lengths": torch.zeros(2, dtype=torch.int32)},
    "stream 1 ": {"lengths": torch.tensor([1, 21])},
    "stream 0 ": {"starts": torch.tensor([-1, 0])},
    "softcap must be positive or None, got 0.0": {"softcap": 0.0},
    "causal must be 0 or divide the 4 query rows, got 3": {"causal": 3},
    "log_weight must be float32/float16 \\[20\\]": {"log_weight": torch.zeros(19)},
}


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    args: dict[str, Any] = {
        "q": torch.zeros(2, 4, 8),
        "keys": torch.zeros(20, 8),
        "values": torch.zeros(20, 8),
        "starts": torch.zeros(2, dtype=torch.int64),
        "lengths": torch.zeros(2, dtype=torch.int64),
        "scale": 1.0,
    }
    args |= BAD[message]
    where = Ranges(args.pop("starts"), args.pop("lengths"))
    q, rows = args.pop("q"), dense(args.pop("keys"), args.pop("values"), args.pop("log_weight", None))
    with pytest.raises(ValueError, match=message):
        decode(q, rows, where, Options(**args))


def test_keys_and_values_have_one_format_and_listed_rows_no_order() -> None:
    rows, nothing = torch.zeros(20, 8), torch.zeros(2, dtype=torch.int64)
    listed = Listed(torch.zeros(2, 3, dtype=torch.int64), nothing)
    with pytest.raises(TypeError, match="keys and values must have one format, got dense keys and packed values"):
        decode(torch.zeros(2, 4, 8), Rows(Dense(rows), quantise(rows, 4, (1, 8))), listed, Options(1.0))
    with pytest.raises(ValueError, match="causal must be 0 for listed rows, which have no order, got 2"):
        decode(torch.zeros(2, 4, 8), dense(rows, rows), listed, Options(1.0, causal=2))


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize(("row", "count"), [(20, 1), (-1, 1), (0, 3), (0, -1)])
def test_listed_rows_must_be_stored(row: int, count: int, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    keys = torch.zeros(20, 8)
    rows = torch.full((1, 2), row, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"stream 0|rows\[0\]|counts\[0\]"):
        decode(torch.zeros(1, 1, 8), dense(keys, keys), Listed(rows, torch.tensor([count])), Options(1.0))
