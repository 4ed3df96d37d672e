# SPDX-License-Identifier: Apache-2.0
"""Column statistics in Triton against float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpress.kernels import Options
from kvpress.kernels.mass import reference
from kvpress.kernels.mass.triton import receive
from tests.kernels.builders import dense, relative_error, streams
from tests.kernels_triton.interpreted.problems import LENGTHS, poison


@pytest.mark.parametrize(
    ("statistic", "dim", "queries", "options"),
    [
        ("sum", 80, 70, {"causal": 35}),
        ("sum", 64, 1, {"causal": 1}),
        ("max", 64, 4, {}),
        ("max", 128, 12, {"causal": 3, "softcap": 4.0}),
        ("squares", 96, 4, {}),
        ("squares", 64, 6, {"causal": 3}),
    ],
)
def test_matches_reference(statistic: Any, dim: int, queries: int, options: dict[str, Any]) -> None:
    s = streams([*LENGTHS, 2], queries, dim)
    keys = torch.randn(s.rows, dim)
    poison(s, keys)
    for log_weight in (None, torch.randn(s.rows)):
        args = (s.q, dense(keys, keys, log_weight), s.where, Options(0.2, **options), statistic)
        assert relative_error(receive(*args), reference.receive(*args)) < 1e-5


@pytest.mark.parametrize("name", ["lse", "sinks", "query_weight"])
def test_options_per_query(name: str) -> None:
    s = streams([65, 0, 30], 6, 64)
    keys = torch.randn(s.rows, 64)
    option = {name: torch.rand(3, 6) * (torch.rand(3, 6) < 0.5) if name == "query_weight" else 5 + torch.randn(3, 6)}
    options = Options(0.2, sinks=option.pop("sinks", None))
    args = (s.q, dense(keys, keys, torch.randn(s.rows)), s.where, options, "sum")
    assert relative_error(receive(*args, **option), reference.receive(*args, **option)) < 1e-5


def test_every_query_gives_a_mass_of_one() -> None:
    s = streams([129, 0, 64], 6, 64, torch.float16)
    keys = torch.randn(s.rows, 64).half()
    out = receive(s.q, dense(keys, keys), s.where, Options(0.1), "sum")
    torch.testing.assert_close(out.sum(), torch.tensor(12.0), rtol=1e-3, atol=0)
