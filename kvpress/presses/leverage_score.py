# SPDX-License-Identifier: Apache-2.0
"""Leverage scores: eviction of keys that other keys can represent."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvpress.core.checks import Count, Positive, Size
from kvpress.core.press import ScorerPress
from kvpress.core.registry import register
from kvpress.observe.observer import Wanted
from kvpress.observe.rotations import ROTATIONS
from kvpress.observe.view import View

RIDGE = 0.01
"""Default ridge added to the diagonal of X^T X, as a fraction of its mean.

Of 1e-5, 1e-3 and 1e-2, the largest did best on the reference model with 10% of the pairs.
"""


@register(
    "leverage_score",
    "evict",
    "Chari & Van Durme, 2025, arXiv:2507.08143",
    example="leverage_score:0.5",
    cases=("leverage_score:0.5,sketch_dimension=16", "leverage_score:0.5,ridge=0.1,n_sink=2"),
)
@dataclass
class LeverageScorePress(ScorerPress):
    """Score a pair by the statistical leverage of its key before rotation: outliers of the key matrix get high scores.

        X[b, h]        = (K - mean over t of K) S,   K [n, D] keys before rotation, S [D, s] Gaussian
        score[b, h, t] = x_t (X^T X + r I)^-1 x_t^T,   r = ridge tr(X^T X) / s

    `sketch_dimension` is s; where the head dimension D is not larger, the keys are used without a sketch. S is the same for
    all layers and calls. The first `n_sink` tokens are always kept. `ridge` limits the weight of directions with little
    variance, which in 16 bits are mostly rounding errors.

    Paper: Chari & Van Durme, Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores,
    2025, arXiv:2507.08143.
    Differs from the paper: r follows the scale of the keys instead of being a constant for stability; leverages are not
    standardised, which would change no choice among the pairs of a head.
    """

    sketch_dimension: Count = 48
    ridge: Positive = field(default=RIDGE, kw_only=True)
    n_sink: Size = field(default=0, kw_only=True)

    @property
    def protected(self) -> int:
        return self.n_sink

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (ROTATIONS,)

    def scores(self, view: View) -> Tensor:
        """Return leverages `[b, h, n]` in [0, 1], infinite for sinks."""
        scores = leverage(view, self.sketch_dimension, self.ridge)
        return scores.masked_fill(view.positions < self.n_sink, torch.inf)


def leverage(view: View, sketch_dimension: int, ridge: float = RIDGE) -> Tensor:
    """Return the leverages `[b, h, n]` of all keys of a view, from a sketch."""
    return torch.stack(
        [of_rows(head.unrotated_keys()[:, 0], sketch_dimension, ridge) for head in view.per_head()], dim=1
    )


def of_rows(keys: Tensor, sketch_dimension: int, ridge: float = RIDGE) -> Tensor:
    """Return the leverages `[b, n]` of keys `[b, n, D]`, in float32."""
    dim, rows = keys.shape[2], keys
    if sketch_dimension < dim:
        normal = torch.randn(dim, sketch_dimension, generator=torch.Generator().manual_seed(0))
        rows = rows @ normal.to(keys.device)
    rows = rows - rows.mean(dim=1, keepdim=True)
    gram = (rows.transpose(1, 2) @ rows).double()
    size = gram.diagonal(dim1=1, dim2=2).mean(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    eye = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    factor = torch.linalg.cholesky_ex(gram + ridge * size[:, None, None] * eye).L
    whiten: Tensor = torch.linalg.solve_triangular(factor, eye.expand_as(factor), upper=False).transpose(1, 2)
    return (rows @ whiten.float()).square().sum(dim=2)
