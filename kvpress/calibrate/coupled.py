# SPDX-License-Identifier: Apache-2.0
"""Calibration of `cq`: codebooks by weighted k-means of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.pairs import SINKS, FitsPairs, PairRecorder, balance
from kvpress.core.checks import Count, Size, check_fields
from kvpress.core.model import ModelFacts
from kvpress.quant.coupled import METHOD, check_coupling
from kvpress.quant.kmeans import kmeans


@dataclass(frozen=True)
class CoupledSettings(FitsPairs):
    """Codebooks of keys and values, for `cq`.

    All keys and values of a layer are in memory while its books are fitted, so that layers are fitted group by group.
    """

    coupled: tuple[int, int] = (4, 4)
    """Channels in a code, of keys and of values."""
    bits: tuple[int, int] = (8, 8)
    """Bits of a code, of keys and of values."""
    fisher: bool = True
    """Whether every vector is weighted by its squared gradient of the language-modelling loss."""
    iterations: Count = 100
    """Rounds of k-means."""
    seed: Size = 0
    """Random seed."""

    method: ClassVar[str] = METHOD

    @property
    def shortest(self) -> int:
        return 2 * SINKS + 1

    def check(self, model: ModelFacts) -> None:
        check_fields(self)
        for name, pair in (("coupled", self.coupled), ("bits", self.bits)):
            if not isinstance(pair, (tuple, list)) or [type(number) for number in pair] != [int, int]:
                raise TypeError(f"{name} must be two integers, for keys and for values, such as (4, 4), got {pair!r}")
        for layer in model.layers:
            check_coupling(layer.head_dim, self.coupled, self.bits)

    def tensors(self, observed: PairRecorder) -> dict[str, Tensor]:
        return fit_books(observed, self)


def fit_books(record: PairRecorder, settings: CoupledSettings) -> dict[str, Tensor]:
    """Return the codebooks of one layer, `keys` and `values`, float16 `[H, D / c, 2**b, c]` each."""
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
