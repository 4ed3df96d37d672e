# SPDX-License-Identifier: Apache-2.0
"""Attention by tiles against the softmax of all logits with everything else masked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvpress.kernels import Tiles, block_prefill, counters, reset_counters
from kvpress.kernels.prefill import cpu, reference
from tests.kernels.builders import relative_error
from tests.kernels.compiler import LEVELS, needs_compiler
from tests.pairwise import every_pair

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = {
    "whole": (200, 200, 64),
    "last": (70, 150, 16),
    "wide": (130, 300, 128),
    "single": (1, 90, 32),
    "odd": (77, 77, 7),
}


@dataclass
class Problem:
    """Random queries, keys, values and tiles."""

    q: Tensor
    keys: Tensor
    values: Tensor
    tiles: Tiles
    real: Tensor | None = None
    softcap: float | None = None
    scale: float = 0.3

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return outputs and log-sum-exps computed with a mask."""
        new, total, group = self.q.shape[2], self.keys.shape[2], self.q.shape[1] // self.keys.shape[1]
        logits = self.q.float() @ self.keys.float().repeat_interleave(group, dim=1).transpose(-1, -2) * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        read = self.tiles.pairs(new, total)
        read = read if self.real is None else read & self.real[:, None, None]
        logits = logits.masked_fill(~read, -torch.inf)
        weights = logits.softmax(dim=-1).nan_to_num(0)
        return weights @ self.values.float().repeat_interleave(group, dim=1), logits.logsumexp(dim=-1)

    def lists(self) -> tuple[Any, ...]:
        """Return the arguments of a back end."""
        lists = self.tiles.lists(self.q.shape[2], self.keys.shape[2])
        return self.q, self.keys, self.values, lists, self.real, self.scale, self.softcap


def problem(
    size: str, dtype: torch.dtype = torch.float32, dims: tuple[int, int] = (64, 64), group: int = 2, density: float = 0.4,
    columns: float | None = None, pads: int = 0, softcap: float | None = None,
) -> Problem:  # fmt: skip
    """Return two rows of two kv heads; the second row may begin with padding."""
    new, total, block = SIZES[size]
    chosen = torch.rand(2, 2 * group, -(-new // block), -(-total // block)) < density
    single = None if columns is None else torch.rand(2, 2 * group, total) < columns
    q, keys = (torch.randn(2, heads, n, dims[0]).to(dtype) for heads, n in ((2 * group, new), (2, total)))
    real = torch.arange(total) >= torch.tensor([[0], [pads]]) if pads else None
    values = torch.randn(2, 2, total, dims[1]).to(dtype)
    return Problem(q, keys, values, Tiles(chosen, block, single), real, softcap)


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert relative_error(actual[0], expected[0]) < 1e-5
    torch.testing.assert_close(actual[1], expected[1], atol=1e-4, rtol=1e-5)


@needs_compiler
@every_pair(
    level=LEVELS, dtype=DTYPES, size=list(SIZES), dims=[(64, 64), (20, 33), (128, 80), (80, 256)], group=[1, 3, 8],
    columns=[None, 0.2], pads=[0, 37], softcap=[None, 5.0],
)  # fmt: skip
def test_every_level_is_the_masked_softmax(
    level: str, dtype: torch.dtype, size: str, dims: tuple[int, int], group: int, columns: float | None, pads: int,
    softcap: float | None,
) -> None:  # fmt: skip
    case = problem(size, dtype, dims, group, columns=columns, pads=pads, softcap=softcap)
    assert_same(cpu.attend(*case.lists(), level=level), case.expected())


@every_pair(size=list(SIZES), group=[1, 3], columns=[None, 0.2], pads=[0, 37], softcap=[None, 5.0])
def test_the_reference_is_the_masked_softmax(
    size: str, group: int, columns: float | None, pads: int, softcap: float | None
) -> None:
    case = problem(size, group=group, columns=columns, pads=pads, softcap=softcap)
    assert_same(reference.attend(*case.lists()), case.expected())


@pytest.mark.parametrize("size", ["whole", "last", "odd"])
def test_all_tiles_are_dense_attention(size: str) -> None:
    case = problem(size, density=2.0)
    new, total = case.q.shape[2], case.keys.shape[2]
    seen = torch.ones(new, total, dtype=torch.bool).tril(total - new)
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q, case.keys, case.values, attn_mask=seen, scale=case.scale, enable_gqa=True
    )
    out, _ = block_prefill(case.q, case.keys, case.values, case.tiles, scale=case.scale)
    assert relative_error(out, expected) < 1e-5


def test_no_tiles_leave_the_diagonal_and_columns_of_the_future_stay_hidden() -> None:
    case = problem("whole", density=-1.0, columns=2.0)
    out, lse = block_prefill(case.q, case.keys, case.values, case.tiles, scale=case.scale)
    dense = Tiles(torch.ones_like(case.tiles.chosen), 64)
    assert_same((out, lse), block_prefill(case.q, case.keys, case.values, dense, scale=case.scale))
    alone = Tiles(case.tiles.chosen, 64)
    diagonal = block_prefill(case.q[:, :, 64:128], case.keys[:, :, 64:128], case.values[:, :, 64:128],
                        Tiles(alone.chosen[:, :, :1, :1], 64), scale=case.scale)  # fmt: skip
    out, lse = block_prefill(case.q, case.keys, case.values, alone, scale=case.scale)
    assert_same((out[:, :, 64:128], lse[:, :, 64:128]), diagonal)


def test_sinks_take_part_in_the_softmax() -> None:
    case, sinks = problem("last"), torch.randn(4)
    out, lse = case.expected()
    total = torch.logaddexp(lse, sinks[:, None].expand_as(lse))
    result = block_prefill(case.q, case.keys, case.values, case.tiles, scale=case.scale, sinks=sinks)
    assert_same(result, (out * (lse - total).exp()[..., None], total))


def test_strides_of_keys_and_unread_memory_do_not_matter() -> None:
    case = problem("whole", columns=0.05, pads=37)
    expected = case.expected()
    wide = [torch.full((2, 300, 2, 100), torch.nan).transpose(1, 2) for _ in range(2)]
    for into, part in zip(wide, (case.keys, case.values), strict=True):
        into[:, :, :200, 10:74] = part
        into[1, :, :37] = torch.nan
    case.keys, case.values = (part[:, :, :200, 10:74] for part in wide)
    assert_same(cpu.attend(*case.lists()), expected)


def test_result_does_not_depend_on_threads() -> None:
    case, results = problem("wide", torch.bfloat16, columns=0.1), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(cpu.attend(*case.lists())[0])
    torch.set_num_threads(1)
    assert all(torch.equal(out, results[0]) for out in results)


@needs_compiler
def test_huge_logits_and_counting() -> None:
    case = problem("last")
    case.scale = 200.0
    reset_counters()
    result = block_prefill(case.q, case.keys, case.values, case.tiles, scale=case.scale)
    assert counters() == {"block_prefill": 1}
    assert relative_error(result[0], case.expected()[0]) < 1e-2  # logits of thousands have an error of 1e-4
    assert result[0].isfinite().all()


BAD: dict[str, dict[str, Any]] = {
    "q must be float32/bfloat16/float16": {"q": torch.zeros(1, 2, 5, 8, dtype=torch.int32)},
    "keys must be float32 \\[1, H, T, 8\\], got float32 \\[1, 1, 9, 7\\]": {"keys": torch.zeros(1, 1, 9, 7)},
    "values must be float32 \\[1, 1, 9, Dv\\]": {"values": torch.zeros(1, 1, 8, 8)},
    "a multiple of the 3 KV heads, got 2": {"keys": torch.zeros(1, 3, 9, 8), "values": torch.zeros(1, 3, 9, 8)},
    "the newest of 9 tokens, got 10": {"q": torch.zeros(1, 2, 10, 8)},
    "block must be at least 1, got 0": {"tiles": Tiles(torch.ones(1, 2, 2, 3).bool(), 0)},
    "chosen must be bool \\[1, 2, 2, 3\\], got bool \\[1, 2, 3, 3\\]": {"tiles": Tiles(torch.ones(1, 2, 3, 3).bool(), 4)},
    "columns must be bool": {"tiles": Tiles(torch.ones(1, 2, 2, 3).bool(), 4, torch.ones(1, 2, 9))},
    "real must be bool \\[1, 9\\]": {"real": torch.ones(1, 9)},
    "softcap must be positive or None, got 0.0": {"softcap": 0.0},
    "sinks must be .* \\[2\\]": {"sinks": torch.zeros(1)},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str) -> None:
    arguments: dict[str, Any] = {
        "q": torch.zeros(1, 2, 5, 8), "keys": torch.zeros(1, 1, 9, 8), "values": torch.zeros(1, 1, 9, 8),
        "tiles": Tiles(torch.ones(1, 2, 2, 3).bool(), 4), "scale": 1.0, **BAD[message],
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        block_prefill(**arguments)
