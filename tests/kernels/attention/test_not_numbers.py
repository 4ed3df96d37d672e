# SPDX-License-Identifier: Apache-2.0
"""A query with NaN or infinity gives NaN; other queries keep their results, or give NaN if they are rounded with it.

A query that sees a key with NaN gives NaN, too.
"""

from __future__ import annotations

import pytest
import torch

from kvpress.kernels import Dense, Listed, Options, Rows
from kvpress.kernels.attention import cpu, reference
from tests.kernels.builders import coded, quantise, relative_error, streams
from tests.kernels.compiler import LEVELS, needs_compiler


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["dense", "packed", "coded", "levels"])
def test_they_are_neither_hidden_nor_spread(name: str, bad: float, level: str) -> None:
    s = streams([200, 0, 2500], 6, 64, torch.bfloat16)
    keys, values = torch.randn(2, s.rows, 64).bfloat16()
    rows = {
        "dense": lambda: Rows(Dense(keys), Dense(values)),
        "packed": lambda: Rows(*(quantise(side.float(), 4, (1, 64))[0] for side in (keys, values))),
        "coded": lambda: Rows(*(coded(s.rows, 64, 8, 8) for _ in range(2))),
        "levels": lambda: Rows(*(coded(s.rows, 64, 1, 4, books=1, shared=True) for _ in range(2))),
    }[name]()
    expected, _ = reference.decode(s.q, rows, s.where, Options(0.1))
    s.q[0, 1, 5] = bad
    for where in (s.where, s.listed()):
        if isinstance(where, Listed):
            expected, _ = reference.decode(s.q.nan_to_num(0, 0, 0), rows, where, Options(0.1))
        out, lse = cpu.decode(s.q, rows, where, Options(0.1), level=level)
        assert out[0, 1].isnan().all()
        assert lse[0, 1].isnan()
        others = torch.ones(3, 6, dtype=torch.bool)
        others[0, 1] = False
        if name in ("packed", "levels"):
            assert out[0].isnan().all()
            others[0] = False
        assert relative_error(out[others], expected[others]) < 1e-3


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at", [0, 2499])
def test_a_key_with_nan_is_not_hidden(at: int, dtype: torch.dtype, level: str) -> None:
    s = streams([200, 1, 2500, 0], 6, 64, dtype)
    keys, values = torch.randn(2, s.rows, 64).to(dtype)
    expected, _ = reference.decode(s.q, Rows(Dense(keys), Dense(values)), s.where, Options(0.1))
    keys[s.starts[1], 3] = keys[s.starts[2] + at, 5] = float("nan")
    for where in (s.where, s.listed()):
        out, lse = cpu.decode(s.q, Rows(Dense(keys), Dense(values)), where, Options(0.1), level=level)
        assert out[1:3].isnan().all()
        assert lse[1:3].isnan().all()
        assert relative_error(out[0], expected[0]) < 1e-3
        assert (out[3] == 0).all()


@needs_compiler
def test_a_key_with_nan_is_not_seen_before_its_turn() -> None:
    s = streams([200], 6, 64)
    keys, values = torch.randn(2, s.rows, 64)
    keys[s.starts[0] + 198, 3] = float("nan")  # the second of three new tokens
    out, _ = cpu.decode(s.q, Rows(Dense(keys), Dense(values)), s.where, Options(0.1, causal=3))
    assert out[0].isnan().all(dim=1).tolist() == [False, True, True] * 2
