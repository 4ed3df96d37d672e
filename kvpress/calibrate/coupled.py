# SPDX-License-Identifier: Apache-2.0
"""Books for coupled quantisation: weighted k-means of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.pairs import SINKS, FitsPairs, PairRecorder, balance
from kvpress.core.checks import Count, check_fields
from kvpress.core.model import ModelFacts
from kvpress.quant.coupled import METHOD, check_coupling
from kvpress.quant.kmeans import kmeans


@dataclass(frozen=True)
class CoupledSettings(FitsPairs):
    """How books are fitted: channels per code and bits per code of keys and of values, and the rounds of k-means.

    With `fisher`, every vector weighs its squared gradient of the language-modelling loss. All keys and values of a layer are
    held while its books are fitted, so layers are taken a few at a time.
    """

    coupled: tuple[int, int] = (4, 4)
    bits: tuple[int, int] = (8, 8)
    fisher: bool = True
    iterations: Count = 100
    seed: int = 0

    method: ClassVar[str] = METHOD

    @property
    def shortest(self) -> int:
        return 2 * SINKS + 1

    def check(self, model: ModelFacts) -> None:
        check_fields(self)
        for layer in model.layers:
            check_coupling(layer.head_dim, self.coupled, self.bits)

    def tensors(self, observed: PairRecorder) -> dict[str, Tensor]:
        return fit_books(observed, self)


def fit_books(record: PairRecorder, settings: CoupledSettings) -> dict[str, Tensor]:
    """Books of one layer, `keys` and `values`, float16 `[H, D / c, 2**b, c]` each."""
    sides = {"keys": (record.keys, record.key_weights), "values": (record.values, record.value_weights)}
    books = {}
    for side, (name, (vectors, gradients)) in enumerate(sides.items()):
        coupled, bits = settings.coupled[side], settings.bits[side]
        points = torch.cat(vectors).permute(1, 2, 0).unflatten(1, (-1, coupled)).transpose(2, 3).float()
        weights = torch.ones(points.shape[:3], device=points.device)
        if settings.fisher:
            squares = torch.cat(gradients).permute(1, 2, 0).unflatten(1, (-1, coupled))
            weights = balance(squares.float().sum(dim=2))
        fitted = [
            kmeans(p, w, 2**bits, settings.iterations, settings.seed)[0] for p, w in zip(points, weights, strict=True)
        ]
        books[name] = torch.stack(fitted).half()
    return books
