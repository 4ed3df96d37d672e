# SPDX-License-Identifier: Apache-2.0
"""Mass of tiles against the softmax of all logits, summed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import counters, reset_counters, tile_mass
from kvpress.kernels.tile_mass import cpu, reference
from tests.kernels.builders import relative_error
from tests.kernels.compiler import LEVELS, needs_compiler
from tests.pairwise import every_pair

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALE = 0.2
SIZES = {
    "causal": (96, 96, (8, 8)),
    "later turn": (37, 300, (8, 8)),
    "few keys": (50, 5, (4, 2)),
    "one query": (1, 70, (8, 16)),
    "single pairs": (13, 33, (1, 1)),
    "wide": (150, 200, (100, 64)),
}


def problem(size: str, dtype: torch.dtype, dim: int, group: int) -> tuple[Any, ...]:
    """Return queries of two kv heads; each sees one key more than the previous one, the first ones of "few keys" none."""
    queries, count, tile = SIZES[size]
    q, keys = torch.randn(2 * group, queries, dim).to(dtype), torch.randn(2, count, dim).to(dtype)
    return q, keys, torch.arange(count - queries, count), tile


def expected(q: Tensor, keys: Tensor, last: Tensor, tile: tuple[int, int]) -> Tensor:
    """Sum the weights `[H, M, K]` over whole tiles, a pair at a time."""
    logits = q.double() @ keys.double().repeat_interleave(len(q) // len(keys), dim=0).transpose(1, 2) * SCALE
    weights = logits.masked_fill(torch.arange(keys.shape[1]) > last[:, None], -torch.inf).softmax(-1).nan_to_num(0)
    mass = torch.zeros(len(q), -(-q.shape[1] // tile[0]), -(-keys.shape[1] // tile[1]), dtype=torch.float64)
    for m in range(q.shape[1]):
        for k in range(keys.shape[1]):
            mass[:, m // tile[0], k // tile[1]] += weights[:, m, k]
    return mass


@needs_compiler
@every_pair(level=LEVELS, dtype=DTYPES, size=list(SIZES), dim=[24, 33, 512], group=[1, 4])
def test_every_level_sums_the_softmax(level: str, dtype: torch.dtype, size: str, dim: int, group: int) -> None:
    args = problem(size, dtype, dim, group)
    assert relative_error(cpu.receive(*args, SCALE, level=level), expected(*args)) < 1e-5


@every_pair(dtype=DTYPES, size=list(SIZES))
def test_the_reference_sums_the_softmax(dtype: torch.dtype, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    args = problem(size, dtype, 24, 2)
    mass = reference.receive(*args, SCALE)
    # The reference rounds its products to the dtype of the queries.
    assert relative_error(mass, expected(*args)) < (1e-5 if dtype == torch.float32 else 0.02)
    monkeypatch.setattr(reference, "CHUNK", 1)
    assert relative_error(reference.receive(*args, SCALE), mass) < (1e-5 if dtype == torch.float32 else 0.02)


def test_neither_strides_nor_threads_change_the_result() -> None:
    q, keys, last, tile = problem("wide", torch.float32, 64, 4)
    contiguous = tile_mass(q, keys, last, tile, scale=SCALE)
    strided = torch.randn(2, 200, 90)[..., 10:74].copy_(keys)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(tile_mass(q, strided, last, tile, scale=SCALE), contiguous)
    torch.set_num_threads(1)


def test_large_logits_keep_their_sum() -> None:
    q, keys, last, tile = problem("causal", torch.float32, 64, 2)
    assert torch.allclose(tile_mass(100 * q, keys, last, tile, scale=SCALE).sum(-1), torch.tensor(8.0))


@needs_compiler
def test_fast_path_is_counted_and_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    args = problem("causal", torch.float32, 24, 2)
    reset_counters()
    fast = tile_mass(*args, scale=SCALE)
    assert counters() == {"tile_mass": 1}
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", "0")
    assert relative_error(tile_mass(*args, scale=SCALE), fast) < 1e-5
    assert counters() == {"tile_mass": 1}


@pytest.mark.parametrize(
    ("message", "bad"),
    [
        (r"q must be .* \[H, M, D\]", {"q": torch.zeros(4, 8)}),
        (r"keys must be float32 \[G, K, 16\], got float32 \[2, 9, 8\]", {"keys": torch.zeros(2, 9, 8)}),
        (r"keys must be float32 .*, got bfloat16", {"keys": torch.zeros(2, 9, 16).bfloat16()}),
        (r"the 4 heads of q must be a multiple of the 3 of keys", {"keys": torch.zeros(3, 9, 16)}),
        (r"last must be int64 \[8\]", {"last": torch.zeros(7, dtype=torch.int64)}),
        (r"tile must have at least one query and one key, got \(8, 0\)", {"tile": (8, 0)}),
    ],
)
def test_bad_arguments_are_named(message: str, bad: dict[str, Any]) -> None:
    args: dict[str, Any] = {
        "q": torch.zeros(4, 8, 16),
        "keys": torch.zeros(2, 9, 16),
        "last": torch.arange(8),
        "tile": (8, 4),
        **bad,
    }
    with pytest.raises(ValueError, match=message):
        tile_mass(**args, scale=SCALE)
