# SPDX-License-Identifier: Apache-2.0
"""Calibration of `kvquant`: ranges of key channels, and levels by weighted k-means of normalised keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.pairs import SINKS, FitsPairs, PairRecorder, balance
from kvpress.core.checks import Count, Ratio, Size, check_fields
from kvpress.core.model import ModelFacts
from kvpress.quant.kmeans import kmeans
from kvpress.quant.kvquant import FITTED_BITS, METHOD, TILE, by_token, centre_and_reach

POINTS = 2**16
"""Most numbers that levels are fitted to, sampled at random."""


@dataclass(frozen=True)
class LevelSettings(FitsPairs):
    """Ranges of key channels and levels of keys and values, for `kvquant`.

    A layer gives, float32, the ranges `low` and `high [H, D]` of key channels before their rotary embedding, and `keys.b` and
    `values.b [2**b]`, ascending, for b = 2, 3 and 4 bits.
    """

    outliers: Ratio = 0.01
    """Share of the numbers outside of their range."""
    fisher: bool = True
    """Whether every number is weighted by its squared gradient of the language-modelling loss."""
    iterations: Count = 50
    """Rounds of k-means."""
    seed: Size = 0
    """Random seed."""

    method: ClassVar[str] = METHOD

    @property
    def shortest(self) -> int:
        return SINKS + TILE

    def check(self, model: ModelFacts) -> None:
        check_fields(self)

    def tensors(self, observed: PairRecorder) -> dict[str, Tensor]:
        return fit_levels(observed, self)


def fit_levels(record: PairRecorder, settings: LevelSettings) -> dict[str, Tensor]:
    """Return the tensors of one layer by name."""
    keys, values = (torch.cat(side).float() for side in (record.keys, record.values))
    rank = 1 + int(settings.outliers / 2 * len(keys))
    low, high = keys.kthvalue(rank, dim=0).values, keys.kthvalue(len(keys) + 1 - rank, dim=0).values
    centre, reach = centre_and_reach(low, high)
    normal = (keys - centre) / reach
    tensors = {"low": low, "high": high}
    weights = torch.cat(record.key_weights) if settings.fisher else torch.ones_like(keys)
    tensors |= levels("keys", normal, weights.float() * reach.square(), normal.abs() <= 1, settings)
    # Values as the codec encodes them: one head at a time, in full tiles.
    length = len(values) // TILE * TILE
    rows = values[:length].transpose(0, 1).flatten(0, 1)
    normal, scale, outlying = by_token(rows, settings.outliers, TILE)
    weights = torch.cat(record.value_weights) if settings.fisher else torch.ones_like(values)
    weights = weights[:length].float().transpose(0, 1).flatten(0, 1) * scale.float()[:, None].square()
    return tensors | levels("values", normal, weights, ~outlying, settings)


def levels(side: str, numbers: Tensor, weights: Tensor, counted: Tensor, settings: LevelSettings) -> dict[str, Tensor]:
    """Return the levels of a side for every width, by name, fitted to the numbers marked by `counted`."""
    numbers, weights = numbers[counted], weights[counted]
    sample = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(settings.seed))[:POINTS]
    points, weight = numbers[sample.to(numbers.device)], balance(weights[sample.to(weights.device)])
    tensors = {}
    for bits in FITTED_BITS:
        fitted, _ = kmeans(points[None, :, None], weight[None], 2**bits, settings.iterations, settings.seed)
        tensors[f"{side}.{bits}"] = fitted.flatten().sort().values
    return tensors
