# SPDX-License-Identifier: Apache-2.0
"""Budgets of layers and heads by how many directions their queries spread over."""

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
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import SampledQueries
from kvpress.observe.view import View
from kvpress.presses.head_shares import HeadShares
from kvpress.presses.snapkv import SnapKVPress


@register(
    "uncomp",
    "budget",
    "Xiong et al., 2024, arXiv:2410.03090",
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
    """SnapKV with larger budgets for layers and heads whose queries have a larger truncated matrix entropy.

        H = -sum over the k largest eigenvalues s of A of s log s / log D,   A = X^T X / tr(X^T X)

    X `[n, D]` are queries of a head before rotation, a sample of at most `queries`, centred and divided by their norms;
    `rank` is k. A kv head has the mean of its query heads. Beside the window, which every head keeps, a head gets in
    proportion to

        (1 - (1 - last_stage) * stage / last) * (1 + spread, or 1 - spread)

    A layer begins a new stage where H, summed over its query heads, falls by more than `drop` from the layer before; `last` is
    the number of the last stage, which gets `last_stage` of what the first one gets, the others evenly between. In a layer, the
    half of the heads with the larger H gets the share 1 + `spread`, the other half 1 - `spread`, one in the middle 1. What
    a head cannot hold goes to the others; the total is met exactly.

    Paper: Xiong et al., UNComp: Can Matrix Entropy Uncover Sparsity? A Compressor Design from an Uncertainty-Aware Perspective,
    2024, arXiv:2410.03090.
    Differs from the paper: entropies are those of the prompt, where the authors measure them beforehand; stages shorten the
    cache of their layers, while hidden states are never dropped, so that reading a prompt is no faster; the budgets have
    the mean that was asked for; generated tokens are kept, unless inside `DecodingPress`.
    """

    window_size: Count = 32
    rank: Count = 32
    drop: Annotated[float, Range(0)] = 1.0
    last_stage: Annotated[float, Range(0, 1, above=True)] = 0.5
    spread: Share = 1 / 3
    queries: Count = 512

    def validate(self) -> None:
        super().validate()
        if self.spread == 1:
            raise ValueError("spread must be < 1, got 1: half of the heads would keep nothing but the window")

    @property
    def sampled(self) -> Wanted:
        """The observer of the queries whose entropy is measured."""
        return Wanted(SampledQueries, self.queries)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        found = super().recipe(model)
        return replace(found, evictions=tuple(replace(step, watches=(self.sampled,)) for step in found.evictions))

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

    Rounded to 9 decimals: two vectors have an entropy of 0, and rounding errors would order heads and layers.
    """
    rows = normalize(vectors - vectors.mean(dim=-2, keepdim=True), dim=-1)
    squares = rows.mT @ rows
    trace = squares.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(torch.finfo(squares.dtype).tiny)
    values = torch.linalg.eigvalsh(squares / trace[..., None, None]).clamp_min(0)
    return (torch.special.entr(values[..., -rank:]).sum(-1) / math.log(vectors.shape[-1])).round(decimals=9)


@dataclass(frozen=True)
class ByEntropy(HeadShares):
    """Shares out by stages of layers and groups of heads; see `UNCompPress`."""

    press: UNCompPress

    @torch.no_grad()
    def weights(self, views: Sequence[View]) -> list[Tensor]:
        found = [self.press.entropies(view) for view in views]
        layers = sorted({view.layer for view in views})
        own = [torch.cat([e for e, view in zip(found, views, strict=True) if view.layer == at]) for at in layers]
        stages = self.stages([float(each.sum()) for each in own])
        stage = 1 - (1 - self.press.last_stage) * stages / stages.amax().clamp_min(1)
        parts = {at: part * self.groups(each.mean(dim=1)) for at, part, each in zip(layers, stage, own, strict=True)}
        return [parts[view.layer][view.heads] for view in views]

    def stages(self, entropies: Sequence[float]) -> Tensor:
        """Return the stage of every layer, float64, counted from 0."""
        found = [0]
        for before, here in itertools.pairwise(entropies):
            found.append(found[-1] + (here - before < -self.press.drop))
        return torch.tensor(found, dtype=torch.float64)

    def groups(self, entropies: Tensor) -> Tensor:
        """Return the share of every head of a layer, `[H]`; their mean is 1."""
        order = entropies.argsort(descending=True, stable=True)
        shares, half = torch.ones_like(entropies), len(entropies) // 2
        shares[order[:half]] += self.press.spread
        shares[order[len(order) - half :]] -= self.press.spread
        return shares
