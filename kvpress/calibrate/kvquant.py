# SPDX-License-Identifier: Apache-2.0
"""Levels for KVQuant: ranges of key channels, and weighted k-means of what keys and values are in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.pairs import SINKS, FitsPairs, PairRecorder, balance
from kvpress.core.checks import Count, Share, Size, check_fields
from kvpress.core.model import ModelFacts
from kvpress.quant.kmeans import kmeans
from kvpress.quant.kvquant import FITTED_BITS, METHOD, TILE, by_token, centre_and_reach

POINTS = 2**16
"""Most numbers that levels are fitted to, drawn from all."""


@dataclass(frozen=True)
class LevelSettings(FitsPairs):
    """How levels are fitted: the share of `outliers` that ranges leave out, and the rounds of k-means.

    With `fisher`, every number weighs its squared gradient of the language-modelling loss. A layer gives, float32, the ranges
    `low` and `high [H, D]` of key channels before their rotary embedding, and `keys.b` and `values.b [2**b]`, ascending, for
    b = 2, 3 and 4 bits.
    """

    outliers: Share = 0.01
    fisher: bool = True
    iterations: Count = 50
    seed: Size = 0

    method: ClassVar[str] = METHOD

    @property
    def shortest(self) -> int:
        return SINKS + TILE

    def check(self, model: ModelFacts) -> None:
        check_fields(self)

    def tensors(self, observed: PairRecorder) -> dict[str, Tensor]:
        return fit_levels(observed, self)


def fit_levels(record: PairRecorder, settings: LevelSettings) -> dict[str, Tensor]:
    """Return what the file holds of one layer."""
    keys, values = (torch.cat(side).float() for side in (record.keys, record.values))
    cut = 1 + int(settings.outliers / 2 * len(keys))
    low, high = keys.kthvalue(cut, dim=0).values, keys.kthvalue(len(keys) + 1 - cut, dim=0).values
    centre, reach = centre_and_reach(low, high)
    normal = (keys - centre) / reach
    found = {"low": low, "high": high}
    weights = torch.cat(record.key_weights) if settings.fisher else torch.ones_like(keys)
    found |= levels("keys", normal, weights.float() * reach.square(), normal.abs() <= 1, settings)
    # As they will be met: a head at a time, in whole tiles of its tokens.
    whole = len(values) // TILE * TILE
    rows = values[:whole].transpose(0, 1).flatten(0, 1)
    normal, scale, outlying = by_token(rows, settings.outliers, TILE)
    weights = torch.cat(record.value_weights) if settings.fisher else torch.ones_like(values)
    weights = weights[:whole].float().transpose(0, 1).flatten(0, 1) * scale.float()[:, None].square()
    return found | levels("values", normal, weights, ~outlying, settings)


def levels(side: str, numbers: Tensor, weights: Tensor, counted: Tensor, settings: LevelSettings) -> dict[str, Tensor]:
    """Levels of the counted numbers for every width."""
    numbers, weights = numbers[counted], weights[counted]
    drawn = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(settings.seed))[:POINTS]
    points, weight = numbers[drawn.to(numbers.device)], balance(weights[drawn.to(weights.device)])
    found = {}
    for bits in FITTED_BITS:
        fitted, _ = kmeans(points[None, :, None], weight[None], 2**bits, settings.iterations, settings.seed)
        found[f"{side}.{bits}"] = fitted.flatten().sort().values
    return found
