# SPDX-License-Identifier: Apache-2.0
"""Calibration of `aquakv`: levels of key channels, and linear predictors of values from decoded keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.cache.layout import Layout
from kvpress.calibrate.pairs import SINKS, PairRecorder
from kvpress.calibrate.run import Observed
from kvpress.core.checks import Count, Size, check_fields
from kvpress.core.model import ModelFacts
from kvpress.quant.aquakv import FITTED_BITS, METHOD
from kvpress.quant.codebook import CodedRows
from kvpress.quant.kmeans import kmeans

POINTS = 2**13
"""Most tokens that levels are fitted to, sampled at random; regressions use all tokens."""
RIDGE = 1e-3
"""Added to the diagonal of a Gram matrix, relative to its mean."""


@dataclass(frozen=True)
class PredictorSettings(Observed):
    """Levels of key channels and predictors of values, for `aquakv`.

    A layer gives, float16, for b = 2, 3 and 4 bits, `keys.b [H, D, 2**b, 1]`, the levels of key channels before their rotary
    embedding, and `weight.b [H, D, D]` and `offset.b [H, D]`, which predict values from decoded keys.
    """

    iterations: Count = 50
    """Rounds of k-means."""
    seed: Size = 0
    """Random seed."""

    method: ClassVar[str] = METHOD
    keeps_pairs: ClassVar[bool] = True

    @property
    def shortest(self) -> int:
        return SINKS + 2

    def check(self, model: ModelFacts) -> None:
        check_fields(self)
        for layer in model.growing:
            if layer.value_dim is not None:
                raise NotImplementedError(f"{model.name} caches latents, which have no values that keys could predict")

    def observer(self) -> PairRecorder:
        return PairRecorder(gradients=False)

    def tensors(self, observed: PairRecorder) -> dict[str, Tensor]:
        keys, values = (torch.cat(side).float().transpose(0, 1) for side in (observed.keys, observed.values))
        sample = torch.randperm(keys.shape[1], generator=torch.Generator().manual_seed(self.seed))[:POINTS]
        points = keys[:, sample.to(keys.device)].mT[..., None]  # [H, D, n, 1]
        weights = torch.ones(points.shape[1:3], device=keys.device)
        layout = Layout([keys.shape[1]] * len(keys))
        head = layout.stream_of_row.to(keys.device)
        tensors = {}
        for bits in FITTED_BITS:
            fitted = [kmeans(p, weights, 2**bits, self.iterations, self.seed)[0] for p in points]
            levels = torch.stack(fitted).half()
            coded = CodedRows.encode(keys.flatten(0, 1), levels, bits, layout)
            decoded = coded.read(torch.arange(layout.total, device=keys.device), head).view_as(keys)
            maps = [regress(k, v) for k, v in zip(decoded, values, strict=True)]
            tensors[f"keys.{bits}"] = levels
            tensors[f"weight.{bits}"], tensors[f"offset.{bits}"] = (
                torch.stack(side).half() for side in zip(*maps, strict=True)
            )
        return tensors


def regress(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight `[C, D]` and offset `[D]`, float64, of the ridge regression of `y [n, D]` on `x [n, C]`.

    The ridge does not apply to the offset.
    """
    x, y = x.double(), y.double()
    middle, mean = x.mean(0), y.mean(0)
    gram = (x - middle).mT @ (x - middle)
    gram += torch.eye(len(gram), dtype=gram.dtype, device=gram.device) * (RIDGE * gram.diagonal().mean()).clamp_min(
        1e-12
    )
    weight = torch.linalg.solve(gram, (x - middle).mT @ (y - mean))
    return weight, mean - middle @ weight
