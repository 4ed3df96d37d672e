"""Dense decode attention against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import counters, dense_decode, dense_select, reset_counters
from kvpress.kernels import reference as plain
from kvpress.kernels.cpu import build, launch
from kvpress.kernels.dense import reference
from tests.kernels.builders import Streams, assert_same_lse, relative_error, streams
from tests.kernels.compiler import needs_compiler

LENGTHS = [0, 1, 17, 63, 129, 300]
HALF = [torch.bfloat16, torch.float16]

LEVELS = build.supported_levels() if launch.level() else ()


def storage(s: Streams, dim: int, value_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(s.rows, dim).to(dtype), torch.randn(s.rows, value_dim).to(dtype)


def low_precision(s: Streams, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """What torch gives when it stays in the storage type: the yardstick of the tolerance."""
    out = torch.zeros(*s.q.shape[:2], values.shape[1])
    for n, rows in enumerate(plain.ranges(s.starts, s.lengths)):
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
    out, lse = dense_decode(s.q, keys, values, s.starts, s.lengths, scale)
    expected, expected_lse = reference(s.q, keys, values, plain.ranges(s.starts, s.lengths), scale)
    bound = 2 * (low_precision(s, keys, values, scale) - expected).abs().max() + 1e-6 * expected.abs().max()
    assert (out - expected).abs().max() <= bound
    assert_same_lse(lse, expected_lse, 1e-5)


def options(name: str, rows: int) -> dict[str, Any]:
    return {"plain": {}, "softcap": {"softcap": 2.0}, "bias": {"bias": torch.randn(rows)}, "causal": {"causal": 3}}[
        name
    ]


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", ["plain", "softcap", "bias", "causal"])
def test_every_level_and_option_agrees(level: str, dtype: torch.dtype, name: str) -> None:
    s = streams([*LENGTHS, 2, 2500], 6, 80, dtype)
    keys, values = storage(s, 80, 100, dtype)
    kwargs = options(name, s.rows)
    out, lse = launch.attend(s.q, keys, values, s.lengths, 0.3, starts=s.starts, level_name=level, **kwargs)
    expected, expected_lse = reference(s.q, keys, values, plain.ranges(s.starts, s.lengths), 0.3, **kwargs)
    assert relative_error(out, expected) < 3e-6
    assert_same_lse(lse, expected_lse, 1e-5)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_select_matches_reference(index: torch.dtype) -> None:
    s = streams([400] * 4, 8, 128, torch.bfloat16)
    keys, values = storage(s, 128, 64, torch.bfloat16)
    rows = torch.stack([torch.randperm(s.rows)[:200] for _ in range(4)]).to(index)
    counts = torch.tensor([200, 0, 1, 77])
    bias = torch.randn(s.rows)
    out, lse = dense_select(s.q, keys, values, rows, counts, 0.1, softcap=3.0, bias=bias)
    expected, expected_lse = reference(s.q, keys, values, plain.listed(rows, counts), 0.1, 3.0, 0, bias)
    assert relative_error(out, expected) < 3e-6
    assert_same_lse(lse, expected_lse, 1e-5)


def test_strided_rows_and_unused_rows_do_not_matter() -> None:
    s = streams([40, 0, 300], 4, 64, torch.bfloat16)
    wide = torch.full((s.rows, 160), float("nan"), dtype=torch.bfloat16)
    used = torch.cat(plain.ranges(s.starts, s.lengths))
    wide[used, :144] = torch.randn(len(used), 144).bfloat16()
    keys, values = wide[:, :64], wide[:, 64:144]
    out, lse = dense_decode(s.q, keys, values, s.starts, s.lengths, 0.1)
    expected, expected_lse = reference(s.q, keys, values, plain.ranges(s.starts, s.lengths), 0.1)
    assert relative_error(out, expected) < 3e-6
    assert_same_lse(lse, expected_lse, 1e-5)


@pytest.mark.parametrize("scale", [-0.2, 0.0, 30.0])
def test_unusual_scales(scale: float) -> None:
    s = streams([100, 1500], 2, 64)
    keys, values = storage(s, 64, 64, torch.float32)
    out, lse = dense_decode(s.q, keys, values, s.starts, s.lengths, scale)
    expected, expected_lse = reference(s.q, keys, values, plain.ranges(s.starts, s.lengths), scale)
    assert relative_error(out, expected) < 1e-4
    assert_same_lse(lse, expected_lse, 1e-3)


def test_result_does_not_depend_on_threads_or_repetition() -> None:
    s = streams([3000, 1, 2049], 4, 128, torch.bfloat16)
    keys, values = storage(s, 128, 128, torch.bfloat16)
    results = []
    for threads in (1, 2, 3, 1):
        torch.set_num_threads(threads)
        results.append(dense_decode(s.q, keys, values, s.starts, s.lengths, 0.1))
    torch.set_num_threads(1)
    assert all(torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1]) for out, lse in results)


def test_streams_split_anywhere_merge_to_the_same() -> None:
    s = streams([500], 4, 64)
    keys, values = storage(s, 64, 64, torch.float32)
    whole, _ = dense_decode(s.q, keys, values, s.starts, s.lengths, 0.1)
    starts, lengths = s.starts + torch.tensor([0, 123, 123]), torch.tensor([123, 0, 377])
    parts, lse = dense_decode(s.q.expand(3, -1, -1), keys, values, starts, lengths, 0.1)
    merged = (lse.softmax(0)[..., None] * parts).sum(0)
    assert relative_error(merged, whole[0]) < 3e-6


@needs_compiler
def test_fast_path_is_counted_and_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    s = streams([40, 50], 2, 64)
    keys, values = storage(s, 64, 64, torch.float32)
    args = (s.q, keys, values, s.starts, s.lengths, 0.1)
    reset_counters()
    fast, _ = dense_decode(*args)
    assert counters() == {"dense_decode": 1}
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", "0")
    slow, _ = dense_decode(*args)
    assert counters() == {"dense_decode": 1}
    assert relative_error(fast, slow) < 3e-6


def test_opcheck() -> None:
    s = streams([4, 0, 9], 3, 16)
    keys, values = storage(s, 16, 24, torch.float32)
    bias = torch.randn(s.rows)
    torch.library.opcheck(
        torch.ops.kvpress.dense_decode.default, (s.q, keys, values, s.starts, s.lengths, 0.1, 5.0, 3, bias)
    )
    rows, counts = torch.zeros(3, 2, dtype=torch.int32), torch.tensor([0, 1, 2])
    torch.library.opcheck(torch.ops.kvpress.dense_select.default, (s.q, keys, values, rows, counts, 0.1, None, None))


BAD = {
    "q must be": {"q": torch.zeros(2, 4, 8, dtype=torch.int32)},
    "keys must be .* 8\\], got float32 \\[20, 9\\]": {"keys": torch.zeros(20, 9)},
    "values must be .* \\[20, Dv\\]": {"values": torch.zeros(19, 8)},
    "values must be float32": {"values": torch.zeros(20, 8).half()},
    "keys must be contiguous": {"keys": torch.zeros(8, 20).T},
    "starts must be int64 \\[2\\]": {"starts": torch.zeros(3, dtype=torch.int64)},
    "lengths must be int64": {"lengths": torch.zeros(2, dtype=torch.int32)},
    "stream 1 ": {"lengths": torch.tensor([1, 21])},
    "stream 0 ": {"starts": torch.tensor([-1, 0])},
    "softcap must be positive or None, got 0.0": {"softcap": 0.0},
    "causal must be 0 or divide the 4 query rows, got 3": {"causal": 3},
    "bias must be float32 \\[20\\]": {"bias": torch.zeros(19)},
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
    with pytest.raises(ValueError, match=message):
        dense_decode(**(args | BAD[message]))


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize(("row", "count"), [(20, 1), (-1, 1), (0, 3), (0, -1)])
def test_listed_rows_must_be_stored(row: int, count: int, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    keys = torch.zeros(20, 8)
    rows = torch.full((1, 2), row, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"stream 0|rows\[0\]|counts\[0\]"):
        dense_select(torch.zeros(1, 1, 8), keys, keys, rows, torch.tensor([count]), 1.0)
