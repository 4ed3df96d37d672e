# SPDX-License-Identifier: Apache-2.0
"""Rounding of codes for the queries that will read them.

Errors of a key end up in channels that queries hardly look at, and errors of values cancel out in the outputs of queries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

DAMPING = 0.03
"""Weight of errors in directions without queries, as a multiple of the mean weight of a channel."""
TOGETHER = 16
"""Channels whose errors are added to all later channels in one product."""
ROUNDS = 2
"""Rounds that fit codes and steps to each other."""
STEPS = 16
"""Steps in which values are rounded; the values of one step make up for the errors of all steps before."""


class QueryMetric:
    """Weights of the errors of keys: the second moments of the queries of each stream, in the basis of the codes.

    An error e of a key changes the logits of queries q by e . q, so that `e G e^T`, G the sum of `q q^T`, is the sum of their
    squared changes.
    """

    def __init__(self, gram: Tensor) -> None:
        """Factor the sums `gram [N, D, D]`."""
        gram = gram.double()
        unit = gram.diagonal(dim1=1, dim2=2).mean(dim=1).clamp_min(1e-30)
        weights = gram + DAMPING * unit[:, None, None] * torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
        # weights = R R^T with R upper triangular, so that what a channel adds depends on later channels alone.
        upper = torch.linalg.cholesky(weights.flip(1, 2)).flip(1, 2)
        eye = torch.eye(len(upper[0]), dtype=upper.dtype, device=upper.device)
        inverse = torch.linalg.solve_triangular(upper, eye.expand_as(upper), upper=True)
        self.weights = (weights / unit[:, None, None]).float()
        self.feedback = (inverse / inverse.diagonal(dim1=1, dim2=2)[:, :, None]).float()

    @torch.no_grad()
    def fit(self, y: Tensor, codes: Tensor, step: Tensor, top_code: int) -> tuple[Tensor, Tensor]:
        """Return centred codes `[N, L, D]` and steps `[N, L, 1]` with less weighted error than those given, row by row.

        Args:
            y: vectors `[N, L, D]`, float32.
            codes: centred codes, `-top_code / 2 ... top_code / 2`.
            step: steps.
            top_code: the largest code.
        """
        weighted = y @ self.weights

        def products(z: Tensor) -> tuple[Tensor, Tensor]:
            return _rows(z @ self.weights, z).clamp_min(1e-30), _rows(weighted, z)

        # Without the part that depends on y alone, the error of codes z with step a is a^2 z G z^T - 2 a y G z^T.
        square, product = products(codes)
        best, trial = step * (step * square - 2 * product), step
        for _ in range(ROUNDS):
            z = self._rounded(y, trial, top_code)
            square, product = products(z)
            trial = torch.where(product > 0, product / square, trial)
            error = trial * (trial * square - 2 * product)
            better = error < best
            codes, step, best = (
                torch.where(better, new, old) for new, old in ((z, codes), (trial, step), (error, best))
            )
        return codes, step

    def _rounded(self, y: Tensor, step: Tensor, top_code: int) -> Tensor:
        """Round channel by channel; later channels make up for the errors of earlier ones.

        The numbers of each row are divided by its step first, so that a channel takes four operations, in place.
        """
        left = (y / step).add_(top_code / 2).permute(2, 0, 1).contiguous()
        codes, later = torch.empty_like(left), self.feedback.permute(1, 2, 0)[..., None].contiguous()
        for start in range(0, len(left), TOGETHER):
            stop = min(start + TOGETHER, len(left))
            errors = torch.empty_like(left[start:stop])
            for channel in range(start, stop):
                code, error = codes[channel], errors[channel - start]
                torch.round(left[channel], out=code).clamp_(0, top_code)
                torch.sub(left[channel], code, out=error)
                left[channel + 1 : stop].addcmul_(later[channel, channel + 1 : stop], error, value=-1)
            if stop < len(left):
                products = self.feedback[:, start:stop, stop:].mT
                left[stop:].transpose(0, 1).baddbmm_(products, errors.transpose(0, 1), alpha=-1)
        return codes.sub_(top_code / 2).permute(1, 2, 0)


def _rows(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner products `[N, L, 1]` of the rows of two tensors."""
    return (a * b).sum(dim=2, keepdim=True)


def rounding_order(length: int) -> tuple[Tensor, list[slice]]:
    """Return a permutation of pairs `[length]`, and the slices of it that `compensated` rounds together, in order of rounding.

    A slice holds every 16th pair, so that the neighbours of a pair can make up for its error.
    """
    parts = [torch.arange(first, length, STEPS) for first in range(min(STEPS, length))]
    ends = itertools.accumulate(map(len, parts), initial=0)
    return torch.cat(parts), [slice(start, stop) for start, stop in itertools.pairwise(ends)][::-1]


@torch.no_grad()
def compensated(y: Tensor, gram: Tensor, slices: list[slice], decoded: Callable[[Tensor], Tensor]) -> Tensor:
    """Return values whose nearest codes give queries nearly the outputs of the values `y`.

    With the errors E of all values, the sum of `tr(E^T G E)` is small, where G are the second moments of the attention weights
    of the queries on the pairs. After a slice is rounded, the values that remain are solved for again.

    Args:
        y: values `[N, L, D]`, float32.
        gram: G with a ridge `[N, L, L]`, of which the lower triangle is read.
        slices: pairs that are rounded together, in order, the last pairs first.
        decoded: rounds values `[N, l, D]` to the nearest codes.
    """
    y, factor = y.clone(), torch.linalg.cholesky(gram)
    for pairs in slices:
        left = slice(0, pairs.start)
        if pairs.start:
            error = y[:, pairs] - decoded(y[:, pairs])
            y[:, left] += torch.cholesky_solve(gram[:, pairs, left].mT @ error, factor[:, left, left])
    return y
