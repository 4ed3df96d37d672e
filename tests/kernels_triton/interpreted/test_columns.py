"""Column statistics in Triton against float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvpress.kernels.triton.columns import columns, reference
from tests.kernels.builders import relative_error, streams
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
def test_matches_reference(statistic: str, dim: int, queries: int, options: dict[str, Any]) -> None:
    s = streams([*LENGTHS, 2], queries, dim)
    keys = torch.randn(s.rows, dim)
    poison(s, keys)
    expected = reference(s.q, keys, s.starts, s.lengths, 0.2, **options, statistic=statistic)
    out = columns(s.q, keys, s.starts, s.lengths, 0.2, **options, statistic=statistic)
    assert relative_error(out, expected) < 1e-5


@pytest.mark.parametrize("given", ["lse", "sinks", "row_weights"])
def test_options_per_query(given: str) -> None:
    s = streams([65, 0, 30], 6, 64)
    keys = torch.randn(s.rows, 64)
    option = {given: torch.rand(3, 6) * (torch.rand(3, 6) < 0.5) if given == "row_weights" else 5 + torch.randn(3, 6)}
    expected = reference(s.q, keys, s.starts, s.lengths, 0.2, **option)
    assert relative_error(columns(s.q, keys, s.starts, s.lengths, 0.2, **option), expected) < 1e-5


def test_every_query_gives_a_mass_of_one() -> None:
    s = streams([129, 0, 64], 6, 64, torch.float16)
    out = columns(s.q, torch.randn(s.rows, 64).half(), s.starts, s.lengths, 0.1, capacity=129)
    torch.testing.assert_close(out.sum(), torch.tensor(12.0), rtol=1e-3, atol=0)


BAD = {
    "statistic must be": {"statistic": "mean"},
    "q must be": {"q": torch.zeros(2, 8)},
    "keys must be": {"keys": torch.zeros(20, 9)},
    "keys must be contiguous": {"keys": torch.zeros(8, 20).T},
    "lse must be float32 \\[2, 4\\]": {"lse": torch.zeros(2, 3)},
    "sinks must be float32 \\[2, 4\\]": {"sinks": torch.zeros(2, 3)},
    "row_weights must be float32 \\[2, 4\\]": {"row_weights": torch.zeros(2, 4).bool()},
    "sinks must not be given with lse": {"sinks": torch.zeros(2, 4), "lse": torch.zeros(2, 4)},
    "starts must be": {"starts": torch.zeros(3, dtype=torch.int64)},
    "lengths must be": {"lengths": torch.zeros(2)},
    "softcap must be": {"softcap": 0.0},
    "causal must be": {"causal": 3},
    "all tensors must be on cpu": {"keys": torch.zeros(20, 8, device="meta")},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str) -> None:
    stream = torch.zeros(2, dtype=torch.int64)
    args: dict[str, Any] = {"q": torch.zeros(2, 4, 8), "keys": torch.zeros(20, 8), "starts": stream, "lengths": stream}
    with pytest.raises(ValueError, match=message):
        columns(**(args | {"scale": 1.0} | BAD[message]))
