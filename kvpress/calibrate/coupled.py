# SPDX-License-Identifier: Apache-2.0
"""Books for coupled quantisation: weighted k-means of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.run import Observed
from kvpress.core.checks import Count, check_fields
from kvpress.core.model import ModelFacts
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer
from kvpress.quant.coupled import METHOD, check_coupling
from kvpress.quant.kmeans import kmeans

SINKS = 4
"""Tokens at the start of each sequence that are left out: their keys are far from all others, and they stay dense."""


@dataclass(frozen=True)
class CoupledSettings(Observed):
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
    layers_at_once: ClassVar[int | None] = 4

    @property
    def gradients(self) -> bool:
        return self.fisher

    @property
    def shortest(self) -> int:
        return 2 * SINKS + 1

    def check(self, model: ModelFacts) -> None:
        check_fields(self)
        for layer in model.layers:
            check_coupling(layer.head_dim, self.coupled, self.bits)

    def observer(self) -> PairRecorder:
        return PairRecorder(self.fisher)

    def tensors(self, observed: PairRecorder) -> dict[str, Tensor]:
        return fit_books(observed, self)


class PairRecorder(Observer):
    """Copies what a layer puts into an empty cache: keys before their rotary embedding and values, `[tokens, H, D]`.

    With `gradients`, also their squared gradients.
    """

    def __init__(self, gradients: bool) -> None:
        self.gradients = gradients
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.key_weights: list[Tensor] = []
        self.value_weights: list[Tensor] = []

    def observe(self, call: LayerCall) -> None:
        if call.written is None:
            raise ValueError(f"{type(call.module).__name__} wrote nothing into its cache")
        keys, values = call.written
        self.keys.append(_tokens(call.unrotated(keys.detach())))
        self.values.append(_tokens(values.detach()))
        if self.gradients:
            keys.register_hook(lambda g: self.key_weights.append(_tokens(call.unrotated(g)).float().square()))
            values.register_hook(lambda g: self.value_weights.append(_tokens(g).float().square()))


def _tokens(vectors: Tensor) -> Tensor:
    """`[1, H, n, D]` as `[n - SINKS, H, D]`, a copy."""
    return vectors[0, :, SINKS:].transpose(0, 1).contiguous()


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


def balance(weights: Tensor) -> Tensor:
    """Scale weights `[..., n]` to mean 1; they span many decades, so the largest thousandth is cut off first."""
    highest = weights.kthvalue(max(1, int(0.999 * weights.shape[-1])), dim=-1, keepdim=True).values
    cut = torch.minimum(weights, highest)
    mean = cut.mean(dim=-1, keepdim=True)
    return torch.where(mean > 0, cut / mean.clamp_min(torch.finfo(cut.dtype).tiny), torch.ones_like(cut))
