# SPDX-License-Identifier: Apache-2.0
"""Least squares over attention weights: block by block and by the smaller Gram matrix, against the whole matrix."""

from __future__ import annotations

import pytest
import torch

from kvpress.cache import attention
from kvpress.cache.attention import Logits
from kvpress.core.least_squares import Design


def design(queries: int, pairs: int, weighed: bool = False) -> Design:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(queries, 8, generator=generator), torch.randn(pairs, 8, generator=generator)
    weight = torch.randn(pairs, generator=generator) if weighed else None
    logits = Logits(0.7)
    return Design(q, k, logits, logits(q, k, weight).logsumexp(dim=-1) + 0.1, weight)


def matrix_of(problem: Design) -> torch.Tensor:
    return problem.shares(slice(None), slice(None)).double()


@pytest.mark.parametrize("blocks", [64 * 2**20, 4 * 100])
@pytest.mark.parametrize(("queries", "pairs"), [(60, 13), (13, 60), (40, 40), (1, 5), (5, 1)])
def test_products_and_solutions_are_those_of_the_matrix(
    queries: int, pairs: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "BLOCK_BYTES", blocks)
    problem = design(queries, pairs, weighed=True)
    matrix = matrix_of(problem)
    values, outputs = torch.randn(pairs, 3).double(), torch.randn(queries, 3).double()
    assert torch.allclose(problem.apply(values), matrix @ values, atol=1e-5)
    assert torch.allclose(problem.back(outputs), matrix.T @ outputs, atol=1e-5)
    for ridge in (0.5, 4.0):
        mean = matrix.square().sum() / pairs
        gram = matrix.T @ matrix + ridge * mean * torch.eye(pairs, dtype=torch.float64)
        assert torch.allclose(problem.solve(outputs, ridge), torch.linalg.solve(gram, matrix.T @ outputs), atol=1e-5)


@pytest.mark.parametrize(("queries", "pairs"), [(60, 13), (13, 60)])
def test_without_a_ridge_outputs_are_met_as_well_as_they_can(queries: int, pairs: int) -> None:
    problem = design(queries, pairs)
    outputs = torch.randn(queries, 3, generator=torch.Generator().manual_seed(1)).double()
    best = torch.linalg.lstsq(matrix_of(problem), outputs, driver="gelsd").solution
    missed = [float((matrix_of(problem) @ x - outputs).norm()) for x in (problem.solve(outputs, 0.0), best)]
    assert missed[0] <= missed[1] + 0.01 * float(outputs.norm())


def test_the_norm_is_about_the_largest_singular_value() -> None:
    problem = design(60, 30)
    largest = float(torch.linalg.matrix_norm(matrix_of(problem), 2))
    assert 0.9 * largest < problem.norm() <= largest
    assert problem.norm(rounds=40) == pytest.approx(largest, rel=1e-3)


@pytest.mark.parametrize(("queries", "pairs"), [(0, 4), (4, 0)])
def test_nothing_to_solve(queries: int, pairs: int) -> None:
    problem = design(max(1, queries), max(1, pairs))
    problem = Design(problem.queries[:queries], problem.keys[:pairs], problem.logits, problem.lse[:queries])
    assert problem.solve(torch.zeros(queries, 2), 1.0).shape == (pairs, 2)
    assert not problem.solve(torch.zeros(queries, 2), 1.0).any()


def test_keys_that_outweigh_the_divisor_give_finite_solutions() -> None:
    """A codec may decode keys whose logits exceed the divisor of all pairs by far."""
    problem = design(60, 13)
    problem = Design(problem.queries, 400 * problem.keys, problem.logits, problem.lse)
    assert bool(problem.solve(torch.randn(60, 3), 1.0).isfinite().all())
    assert bool(torch.isfinite(torch.tensor(problem.norm())))
