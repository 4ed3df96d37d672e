# SPDX-License-Identifier: Apache-2.0
"""Least squares over attention weights: values, or factors, of pairs that bring the outputs of queries close to a target.

The design matrix holds the attention weights of `M` queries on `t` pairs. It is computed once where it fits in
`attention.BLOCK_BYTES`, on a GPU in eight times as much; a larger one is never stored, and products compute it block by block.
`solve` factors the Gram matrix of its shorter side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvpress.cache import attention
from kvpress.cache.attention import Logits

FLOOR = 1e-7
"""Least ridge, as a multiple of the mean diagonal, used even for ridge=0; directions without queries keep their values."""
LARGEST = 30.0
"""Largest exponent of a weight: keys that a codec decodes badly may exceed the divisor, and their squares must stay finite."""
GPU_BLOCKS = 8
"""Blocks of `attention.BLOCK_BYTES` that a design may fill on a GPU."""
STRIPS = 8
"""Strips of rows in which the lower triangle of a Gram matrix is computed on a CPU; most of the upper one is left out."""


@dataclass(frozen=True)
class Design:
    """Attention weights `exp(logit + log_weight - lse)` of M queries on t keys, float32."""

    queries: Tensor
    """Queries `[M, D]`."""
    keys: Tensor
    """Keys `[t, D]`."""
    logits: Logits
    """Scale and softcap of the logits."""
    lse: Tensor
    """Logarithm of the divisor of the weights of each query, `[M]`."""
    log_weight: Tensor | None = None
    """Log-weights `[t]`; None for zeros."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of queries and number of pairs."""
        return len(self.queries), len(self.keys)

    @cached_property
    def _stored(self) -> tuple[Tensor, Tensor] | None:
        """Weights `[M, t]` relative to the largest of each query, and the logits `[M]` of those; None if they are too large."""
        queries, pairs = self.shape
        if not pairs or 4 * queries * pairs > block_bytes(self.keys.device):
            return None
        scores = self.logits(self.queries, self.keys, self.log_weight)
        top = scores.amax(dim=1)
        return scores.sub_(top[:, None]).exp_(), top

    def part(self, pairs: slice | Tensor) -> Design:
        """Return the design restricted to some pairs, in this order."""
        if isinstance(pairs, slice) and pairs.indices(len(self.keys)) == (0, len(self.keys), 1):
            return self
        weight = None if self.log_weight is None else self.log_weight[pairs]
        return replace(self, keys=self.keys[pairs], log_weight=weight)

    def weighed(self, log_weight: Tensor) -> Design:
        """Return the design with other log-weights `[t]`, float32."""
        design = replace(self, log_weight=log_weight)
        if self._stored is not None:
            shares, top = self._stored
            change = log_weight if self.log_weight is None else log_weight - self.log_weight
            vars(design)["_stored"] = shares * change.exp(), top
        return design

    def normalised(self, sinks: Tensor | None) -> Design:
        """Return the design whose weights sum to 1 for each query, together with the learned `sinks [M]`, if any."""
        if self._stored is None:
            lse = torch.cat(
                [self.logits(self.queries[rows], self.keys, self.log_weight).logsumexp(dim=1) for rows in self._rows()]
            )
        else:
            shares, top = self._stored
            lse = shares.sum(dim=1).log() + top
        design = replace(self, lse=lse if sinks is None else torch.logaddexp(lse, sinks))
        vars(design)["_stored"] = self._stored
        return design

    @cached_property
    def _factors(self) -> Tensor:
        """Factors `[M, 1]` from the stored weights of each query to those of the design."""
        assert self._stored is not None  # noqa: S101 - for type checkers
        return (self._stored[1] - self.lse).clamp_max(LARGEST).exp()[:, None]

    def shares(self, rows: slice, pairs: slice) -> Tensor:
        """Return the weights `[m, n]` of some queries on some pairs."""
        if self._stored is not None:
            return self._stored[0][rows, pairs] * self._factors[rows]
        design = self.part(pairs)
        excess = self.logits(self.queries[rows], design.keys, design.log_weight) - self.lse[rows, None]
        return torch.exp(excess.clamp_max(LARGEST))

    def _rows(self) -> list[slice]:
        return _blocks(*self.shape, self.keys.device)

    def by_queries(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks `[m, t]` of rows, with their slice."""
        for rows in self._rows():
            yield rows, self.shares(rows, slice(None))

    def by_pairs(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield blocks `[M, m]` of columns, with their slice."""
        queries, pairs = self.shape
        for columns in _blocks(pairs, queries, self.keys.device):
            yield columns, self.shares(slice(None), columns)

    def apply(self, values: Tensor) -> Tensor:
        """Return the product `[M, C]` of the design and `values [t, C]`, in the dtype of `values`."""
        if self._stored is not None:
            return self._stored[0].to(values.dtype) @ values * self._factors.to(values.dtype)
        product = values.new_zeros(len(self.queries), values.shape[1])
        for rows, shares in self.by_queries():
            product[rows] = shares.to(values.dtype) @ values
        return product

    def back(self, outputs: Tensor) -> Tensor:
        """Return the product `[t, C]` of the transposed design and `outputs [M, C]`, in the dtype of `outputs`."""
        if self._stored is not None:
            return self._stored[0].T.to(outputs.dtype) @ (outputs * self._factors.to(outputs.dtype))
        product = outputs.new_zeros(len(self.keys), outputs.shape[1])
        for pairs, shares in self.by_pairs():
            product[pairs] = shares.T.to(outputs.dtype) @ outputs
        return product

    def mean_diagonal(self) -> Tensor:
        """Return the mean diagonal of the Gram matrix over pairs, float64."""
        total = torch.zeros((), dtype=torch.float64, device=self.keys.device)
        for _, shares in self.by_queries():
            total += shares.square().sum()
        return total / max(1, len(self.keys))

    def solve(self, outputs: Tensor, ridge: float, unit: Tensor | None = None) -> Tensor:
        """Return x `[t, C]` that minimises |design x - outputs|^2 + lambda |x|^2, in the dtype of `outputs [M, C]`.

        lambda is `max(ridge, FLOOR)` times `unit`, by default the mean diagonal of the Gram matrix over pairs.
        """
        queries, pairs = self.shape
        few = pairs <= queries
        gram, right = self._normal_equations(outputs) if few else (self._gram_of_queries(outputs.dtype), outputs)
        self._add_ridge(gram, ridge, unit)
        solved = torch.cholesky_solve(right, torch.linalg.cholesky(gram))  # reads the lower triangle
        return solved if few else self.back(solved)

    def ridged_gram(self, ridge: float, unit: Tensor) -> Tensor:
        """Return the Gram matrix `[t, t]` over pairs with the lambda of `solve` on its diagonal, float32.

        Only its lower triangle is complete.
        """
        gram, _ = self._normal_equations(self.lse.new_empty(len(self.queries), 0))
        self._add_ridge(gram, ridge, unit)
        return gram

    def _add_ridge(self, gram: Tensor, ridge: float, unit: Tensor | None) -> None:
        """Add lambda to the diagonal of a Gram matrix, over pairs or over queries; see `solve`."""
        unit = gram.diagonal().double().sum() / max(1, len(self.keys)) if unit is None else unit
        gram.diagonal().add_((max(ridge, FLOOR) * unit).clamp_min(1e-30).to(gram.dtype))

    def _normal_equations(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Gram matrix `[t, t]` over pairs, and the product of the transposed design and `outputs [M, C]`."""
        pairs, dtype = len(self.keys), outputs.dtype
        gram, right = outputs.new_zeros(pairs, pairs), outputs.new_zeros(pairs, outputs.shape[1])
        for rows, block in self.by_queries():
            shares = block.to(dtype)
            _add_gram(gram, shares)
            right.addmm_(shares.T, outputs[rows])
        return gram, right

    def _gram_of_queries(self, dtype: torch.dtype) -> Tensor:
        """Return the Gram matrix `[M, M]` over queries."""
        gram = torch.zeros(len(self.queries), len(self.queries), dtype=dtype, device=self.keys.device)
        if self._stored is not None:
            _add_gram(gram, self._stored[0].T.to(dtype))
            factors = self._factors.to(dtype)
            return gram.mul_(factors).mul_(factors.T)
        for _, block in self.by_pairs():
            _add_gram(gram, block.T.to(dtype))
        return gram

    def norm(self, rounds: int = 3) -> float:
        """Return an estimate of the largest singular value, after `rounds` power iterations."""
        vector = torch.ones(self.shape[1], 1, device=self.keys.device)
        size = 0.0
        for _ in range(rounds):
            vector = self.back(self.apply(vector / vector.norm().clamp_min(1e-30)))
            size = float(vector.norm())
        singular_value: float = size**0.5
        return singular_value


def _add_gram(gram: Tensor, shares: Tensor) -> None:
    """Add `shares.T @ shares` to a square matrix; on a CPU, entries right of the diagonal's strips are left out."""
    if gram.device.type != "cpu":  # a strip would not fill the multiprocessors
        gram.addmm_(shares.T, shares)
        return
    step = -(-len(gram) // STRIPS)
    for start in range(0, len(gram), max(1, step)):
        stop = min(start + step, len(gram))
        gram[start:stop, :stop].addmm_(shares[:, start:stop].T, shares[:, :stop])


def block_bytes(device: torch.device) -> int:
    """Return the most bytes of a block of a design."""
    return attention.BLOCK_BYTES * (1 if device.type == "cpu" else GPU_BLOCKS)


def _blocks(length: int, width: int, device: torch.device) -> list[slice]:
    """Return slices of `length` for which a float32 block of `width` fits in `block_bytes`."""
    step = max(1, block_bytes(device) // (4 * max(1, width)))
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
