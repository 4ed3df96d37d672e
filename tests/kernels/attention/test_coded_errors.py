# SPDX-License-Identifier: Apache-2.0
"""Codes, codebooks, scales and angles that do not match are refused by name, with the kernels and without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvpress.kernels import Coded, Listed, Options, Ranges, Rotary, Rows, decode

ANGLES = Rotary(torch.zeros(1, 2, 2), torch.zeros(64, 2, 2), torch.zeros(2).long(), torch.zeros(20).int())
BAD: dict[str, dict[str, Any]] = {
    "keys.codes must be uint8 \\[20, 2\\]": {"keys": {"codes": torch.zeros(20, 3, dtype=torch.uint8)}},
    "keys.codes must be uint8 .*got int16": {"keys": {"codes": torch.zeros(20, 2, dtype=torch.int16)}},
    "values.codes must be uint8 \\[20, 2\\]": {"values": {"codes": torch.zeros(19, 2, dtype=torch.uint8)}},
    "values.codes must be uint8 \\[20, 1\\]": {"values": {"bits": 4}},
    "keys.codes must be contiguous": {"keys": {"codes": torch.zeros(2, 20, dtype=torch.uint8).T}},
    "keys.bits must be one of \\(1, 2, 3, 4, 8, 9, 10, 12\\), got 5": {"keys": {"bits": 5}},
    "values must have a multiple of 4 groups for 10 bits, got 2": {"values": {"bits": 10}},
    "keys.book must be float16/float32": {"keys": {"book": torch.zeros(2, 2, 16, 4, dtype=torch.bfloat16)}},
    "keys.book must be contiguous": {"keys": {"book": torch.zeros(2, 2, 4, 16).transpose(2, 3)}},
    "keys.book must hold 8 channels": {"keys": {"book": torch.zeros(2, 2, 16, 3)}},
    "keys.book must hold 8 channels like q": {"keys": {"book": torch.zeros(2, 1, 16, 3)}},
    "keys.book must hold at least one book and channel": {"keys": {"book": torch.zeros(2, 2, 16, 0)}},
    "keys.book must have 1 to 256 entries for 8 bits, got 257": {"keys": {"book": torch.zeros(2, 2, 257, 4)}},
    "values.book must have 1 to 16 entries for 4 bits, got 17": {
        "values": {"bits": 4, "book": torch.zeros(2, 2, 17, 4)}
    },
    "values.book must hold 2 books like keys.book, got 1": {"values": {"book": torch.zeros(1, 2, 16, 4)}},
    "keys.row_scale must be float32/bfloat16/float16 \\[20\\]": {"keys": {"row_scale": torch.zeros(20, 1)}},
    "values.row_scale must be contiguous": {"values": {"row_scale": torch.zeros(40)[::2]}},
    "stream must be int64 \\[2\\]": {"where": {"stream": torch.zeros(3, dtype=torch.int64)}},
    "stream must be in \\[0, 2147483648\\), got -1 .. 0": {"where": {"stream": torch.tensor([-1, 0])}},
    "stream must be in \\[0, 2\\), got 0 .. 2": {"where": {"stream": torch.tensor([2, 0])}, "rotary": {}},
    "values.rotary must be None": {"values": {"rotary": ANGLES}},
    "fine must be float32 \\[64, 2, rotary / 2\\]": {"rotary": {"fine": torch.zeros(63, 2, 2)}},
    "fine must rotate at most 8 channels, got 10": {"rotary": {"fine": torch.zeros(64, 2, 5)}},
    "coarse must be float32 \\[P / STEP, 2, 2\\]": {"rotary": {"coarse": torch.zeros(1, 2, 3)}},
    "coarse must be contiguous": {"rotary": {"coarse": torch.zeros(2, 2, 2).transpose(1, 2)}},
    "shift must be int64 \\[2\\]": {"rotary": {"shift": torch.zeros(3, dtype=torch.int64)}},
    "positions must be int32 \\[20\\]": {"rotary": {"positions": torch.zeros(20)}},
    "stream 1 .*positions": {"rotary": {"positions": torch.full((20,), 64, dtype=torch.int32)}},
    "softcap must be positive or None, got 0.0": {"options": {"softcap": 0.0}},
    "log_weight must be float32/float16 \\[20\\]": {"rows": {"log_weight": torch.zeros(19)}},
    "sinks must be float32 \\[2, 4\\]": {"options": {"sinks": torch.zeros(2)}},
}
BAD_RANGES: dict[str, dict[str, Any]] = {
    "stream 1 ": {"where": {"lengths": torch.tensor([1, 21])}},
    "starts must be int64 \\[2\\]": {"where": {"starts": torch.zeros(3, dtype=torch.int64)}},
    "causal must be 0 or divide the 4 query rows, got 3": {"options": {"causal": 3}},
}
BAD_LISTS: dict[str, dict[str, Any]] = {
    "counts\\[1\\]|stream 1 ": {"where": {"counts": torch.tensor([0, 6])}},
    "rows\\[1\\]|stream 1 ": {"where": {"rows": torch.tensor([[0] * 5, [0, 20, 0, 0, 0]])}},
    "rows must be int32/int64": {"where": {"rows": torch.zeros(2, 5)}},
}
CASES = [
    *((Ranges(torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2])), *case) for case in (BAD | BAD_RANGES).items()),
    *((Listed(torch.zeros(2, 5).long(), torch.tensor([0, 2])), *case) for case in (BAD | BAD_LISTS).items()),
]


def stored(changes: dict[str, Any]) -> Rows:
    codes = torch.zeros(20, 2, dtype=torch.uint8)
    keys, values = (
        replace(Coded(codes, torch.zeros(2, 2, 16, 4), 8), **changes.get(name, {})) for name in ("keys", "values")
    )
    if "rotary" in changes:
        keys = replace(keys, rotary=replace(ANGLES, **changes["rotary"]))
    return Rows(keys, values, **changes.get("rows", {}))


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize(("where", "message", "changes"), CASES)
def test_bad_arguments_are_named(
    where: Ranges | Listed, message: str, changes: dict[str, Any], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    where = replace(where, **changes.get("where", {}))
    options = Options(1.0, **changes.get("options", {}))
    with pytest.raises(ValueError, match=message):
        decode(torch.zeros(2, 4, 8), stored(changes), where, options)


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("shift", [-4, 60, 2**63 - 1, -(2**63)])
def test_positions_outside_the_tables_are_refused(
    shift: int, numbered: bool, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    positions = torch.arange(20, dtype=torch.int32) if numbered else None
    rows = stored({"rotary": {"shift": torch.tensor([0, shift]), "positions": positions}})
    q, starts, numbers = torch.zeros(2, 4, 8), torch.tensor([0, 3]), torch.tensor([[0, 0], [4, 3]])
    decode(q, rows, Ranges(starts, torch.tensor([20, 0])), Options(1.0))
    with pytest.raises(ValueError, match=r"stream 1 .*positions"):
        decode(q, rows, Ranges(starts, torch.tensor([20, 2])), Options(1.0))
    decode(q, rows, Listed(numbers, torch.tensor([2, 0])), Options(1.0))
    with pytest.raises(ValueError, match=r"stream 1 .*positions"):
        decode(q, rows, Listed(numbers, torch.tensor([2, 2])), Options(1.0))
