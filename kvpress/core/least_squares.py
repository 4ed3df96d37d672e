# SPDX-License-Identifier: Apache-2.0
"""Least squares over attention weights: which values, or logit weights, of some pairs give the outputs that queries should get.

A design is the matrix of the attention `M` queries pay to `t` pairs. It is never held: products with it go through it block by
block, and what is solved is the Gram matrix of its shorter side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpress.cache import attention
from kvpress.cache.attention import Logits

FLOOR = 1e-7
"""Ridge, times the mean diagonal, of what is asked to be solved without: what the queries leave open stays as it was."""


@dataclass(frozen=True)
class Design:
    """Attention weights `exp(logit + log_weight - lse)` of `queries [M, D]` on `keys [t, D]`, float32.

    `lse [M]` is the log of what the weights of a query are divided by; `log_weight [t]` is None for zeros.
    """

    queries: Tensor
    keys: Tensor
    logits: Logits
    lse: Tensor
    log_weight: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Queries and pairs."""
        return len(self.queries), len(self.keys)

    def part(self, pairs: slice) -> Design:
        """Return the columns of some pairs."""
        weight = None if self.log_weight is None else self.log_weight[pairs]
        return replace(self, keys=self.keys[pairs], log_weight=weight)

    def shares(self, rows: slice, pairs: slice) -> Tensor:
        """Return the weights `[m, n]` of some queries on some pairs."""
        part = self.part(pairs)
        return torch.exp(self.logits(self.queries[rows], part.keys, part.log_weight) - self.lse[rows, None])

    def by_queries(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield all rows, in blocks `[m, t]`."""
        queries, pairs = self.shape
        for rows in _blocks(queries, pairs):
            yield rows, self.shares(rows, slice(None))

    def by_pairs(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield all columns, in blocks `[M, m]`."""
        queries, pairs = self.shape
        for columns in _blocks(pairs, queries):
            yield columns, self.shares(slice(None), columns)

    def apply(self, values: Tensor) -> Tensor:
        """Return the design times `values [t, C]`, `[M, C]`, in their dtype."""
        found = values.new_zeros(len(self.queries), values.shape[1])
        for rows, shares in self.by_queries():
            found[rows] = shares.to(values.dtype) @ values
        return found

    def back(self, outputs: Tensor) -> Tensor:
        """Return the transposed design times `outputs [M, C]`, `[t, C]`, in their dtype."""
        found = outputs.new_zeros(len(self.keys), outputs.shape[1])
        for pairs, shares in self.by_pairs():
            found[pairs] = shares.T.to(outputs.dtype) @ outputs
        return found

    def solve(self, outputs: Tensor, ridge: float) -> Tensor:
        """Return the x `[t, C]` with the least |design x - outputs|^2 + lambda |x|^2; `outputs [M, C]` say in which dtype.

        lambda is `ridge` times the mean diagonal of the Gram matrix over pairs, at least `FLOOR` times.
        """
        queries, pairs = self.shape
        dtype, few = outputs.dtype, pairs <= queries
        size = min(queries, pairs)
        gram = torch.zeros(size, size, dtype=dtype, device=outputs.device)
        right = torch.zeros(pairs, outputs.shape[1], dtype=dtype, device=outputs.device) if few else outputs
        diagonal = torch.zeros((), dtype=torch.float64, device=outputs.device)
        for part, block in self.by_queries() if few else self.by_pairs():
            shares = block.to(dtype)
            diagonal += shares.square().sum()
            gram += shares.T @ shares if few else shares @ shares.T
            if few:
                right += shares.T @ outputs[part]
        gram.diagonal().add_((max(ridge, FLOOR) * diagonal / max(1, pairs)).clamp_min(1e-30).to(dtype))
        solved = torch.cholesky_solve(right, torch.linalg.cholesky(gram))
        return solved if few else self.back(solved)

    def norm(self, rounds: int = 3) -> float:
        """Return about the largest singular value, by so many power iterations."""
        vector = torch.ones(self.shape[1], 1, device=self.keys.device)
        size = 0.0
        for _ in range(rounds):
            vector = self.back(self.apply(vector / vector.norm().clamp_min(1e-30)))
            size = float(vector.norm())
        return size**0.5


def _blocks(length: int, width: int) -> list[slice]:
    """Cut `length` so that a float32 block of `width` fits in BLOCK_BYTES."""
    most = max(1, attention.BLOCK_BYTES // (4 * max(1, width)))
    return [slice(start, min(start + most, length)) for start in range(0, length, most)]
