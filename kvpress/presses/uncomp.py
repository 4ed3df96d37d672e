# SPDX-License-Identifier: Apache-2.0
"""UNComp: budgets of layers and heads by the matrix entropy of their queries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvpress.core.checks import Count, Range, Share
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Allocator, Recipe
from kvpress.core.registry import Exemption, register
from kvpress.core.scoring import Scored
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import SampledQueries
from kvpress.observe.view import View
from kvpress.presses.head_shares import HeadShares
from kvpress.presses.snapkv import SnapKVPress

DROP = 1 / 75
"""Relative fall of entropy: the authors' stages begin at a fall of 1, where their entropies of layers are about 75."""


@register(
    "uncomp",
    "budget",
    "after Xiong et al., 2024, arXiv:2410.03090",
    example="uncomp:0.5",
    cases=(
        "uncomp:0.5,window_size=4",
        "uncomp:0.6,window_size=4,rank=4,drop=0.01,last_stage=0.25,spread=0.6,queries=16",
    ),
    exempt=(
        Exemption(
            "pairs per layer", "entropy shares out the budget among layers and heads; replayed from sampled queries"
        ),
    ),
)
@dataclass
class UNCompPress(SnapKVPress):
    """Run SnapKV with larger budgets for layers and heads whose queries have a larger truncated matrix entropy.

        H = -sum over the k largest eigenvalues s of A of s log s / log D,   A = X^T X / tr(X^T X)

    X `[n, D]` are queries of a head before rotation, a sample of at most `queries`, centred and divided by their norms;
    `rank` is k. The H of a KV head is the mean over its query heads. In addition to the window, which every head keeps, a
    head's budget is proportional to

        (1 - (1 - last_stage) * stage / last) * (1 + spread, or 1 - spread)

    A new stage begins at a layer whose mean H over its query heads is lower than that of the layer before by more than the
    share `drop` of it. `last` is the number of the last stage, which gets `last_stage` of the budget of the first stage; the
    others lie evenly in between. In a layer, the half of the heads with the larger H gets the factor 1 + `spread`, the other
    half 1 - `spread`, and a head in the middle 1. Budget that exceeds a head's pairs goes to other heads; the total is met
    exactly.

    Paper: after Xiong et al., UNComp: Can Matrix Entropy Uncover Sparsity? A Compressor Design from an Uncertainty-Aware
    Perspective, 2024, arXiv:2410.03090.
    Differs from the paper: the authors begin a stage at a fall of 1 of a sum over heads; that fall over their published sums
    of about 75 is the default `drop`, which gives the stages of their 32 layers and serves any number of heads. Entropies are
    those of the prompt, where the authors measure them beforehand; stages shorten the cache of their layers, while hidden
    states are never dropped, so that prefill is no faster; the mean of the budgets is the requested one; generated tokens are
    kept, unless inside `DecodingPress`.
    """

    window_size: Count = 32
    rank: Count = 32
    drop: Share = DROP
    last_stage: Annotated[float, Range(0, 1, above=True)] = 0.5
    spread: Share = 1 / 3
    queries: Count = 512

    def validate(self) -> None:
        super().validate()
        if self.spread == 1:
            raise ValueError("spread must be < 1, got 1: half of the heads would keep nothing but the window")

    @property
    def sampled(self) -> Wanted:
        """Observer of the queries whose entropy is measured."""
        return Wanted(SampledQueries, self.queries)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        recipe = super().recipe(model)
        return replace(recipe, evictions=tuple(replace(step, watches=(self.sampled,)) for step in recipe.evictions))

    @property
    def allocator(self) -> Allocator:
        return ByEntropy(self.window_size, self, scope="cache")

    def entropies(self, view: View) -> Tensor:
        """Return the entropy of every query head of a view of one row, `[h, G]`, float64 on the host."""
        observer = view.observer(self.sampled)
        (row,) = view.rows
        real = observer.order[row].isfinite()
        queries = view.query_heads(observer.queries)[0][:, real].double()
        return truncated_entropy(queries, self.rank).cpu().view(view.shape[1], -1)


def truncated_entropy(vectors: Tensor, rank: int) -> Tensor:
    """Return the entropy of the `rank` largest eigenvalues of the covariance of the directions of `vectors [..., n, D]`.

    It is rounded to 9 decimals, so that rounding errors do not order heads and layers of equal entropy (two vectors have
    0).
    """
    rows = normalize(vectors - vectors.mean(dim=-2, keepdim=True), dim=-1)
    squares = rows.mT @ rows
    trace = squares.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(torch.finfo(squares.dtype).tiny)
    values = torch.linalg.eigvalsh(squares / trace[..., None, None]).clamp_min(0)
    entropy: Tensor = torch.special.entr(values[..., -rank:]).sum(-1)
    return (entropy / math.log(vectors.shape[-1])).round(decimals=9)


@dataclass(frozen=True)
class ByEntropy(HeadShares):
    """Distribute pairs by stages of layers and groups of heads; see `UNCompPress`."""

    press: UNCompPress
    """Press with the settings."""

    @torch.no_grad()
    def weights(self, scored: Sequence[Scored]) -> list[Tensor]:
        entropies = [item.share(self._entropies)[0] for item in scored]
        views = [item.view for item in scored]
        layers = sorted({view.layer for view in views})
        layer_entropies = [
            torch.cat([e for e, view in zip(entropies, views, strict=True) if view.layer == at]) for at in layers
        ]
        stages = self.stages([float(heads.mean()) for heads in layer_entropies])
        stage = 1 - (1 - self.press.last_stage) * stages / stages.amax().clamp_min(1)
        weights = {
            at: factor * self.groups(heads.mean(dim=1))
            for at, factor, heads in zip(layers, stage, layer_entropies, strict=True)
        }
        return [weights[view.layer][view.model_heads] for view in views]

    def _entropies(self, scored: Scored, counts: int | Tensor) -> Tensor:
        """Return the entropies `[1, h, G]` of the query heads of one row."""
        del counts
        return self.press.entropies(scored.whole)[None]

    def stages(self, entropies: Sequence[float]) -> Tensor:
        """Return the stage of every layer, float64, counted from 0."""
        numbers = [0]
        for previous, current in itertools.pairwise(entropies):
            numbers.append(numbers[-1] + (previous - current > self.press.drop * previous))
        return torch.tensor(numbers, dtype=torch.float64)

    def groups(self, entropies: Tensor) -> Tensor:
        """Return the factor of every head of a layer, `[H]`; the mean is 1."""
        order = entropies.argsort(descending=True, stable=True)
        factors, half = torch.ones_like(entropies), len(entropies) // 2
        factors[order[:half]] += self.press.spread
        factors[order[len(order) - half :]] -= self.press.spread
        return factors
