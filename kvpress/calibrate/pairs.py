# SPDX-License-Identifier: Apache-2.0
"""Keys and values of texts, and how much each matters: what tables of codecs are fitted to."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.run import Observed
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer

SINKS = 4
"""Tokens at the start of each sequence that are left out: their keys are far from all others, and they stay dense."""


class FitsPairs(Observed):
    """Fits tables to the keys and values of texts; with `fisher`, each weighs its squared gradient of the loss.

    All keys and values of a layer are held while its tables are fitted, so layers are taken a few at a time.
    """

    fisher: bool

    layers_at_once: ClassVar[int | None] = 4

    @property
    def gradients(self) -> bool:
        return self.fisher

    def observer(self) -> PairRecorder:
        return PairRecorder(self.fisher)


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
            raise ValueError(f"{type(call.layer.module).__name__} wrote nothing into its cache")
        keys, values = call.written
        self.keys.append(_tokens(call.unrotated(keys.detach())))
        self.values.append(_tokens(values.detach()))
        if self.gradients:
            keys.register_hook(lambda g: self.key_weights.append(_tokens(call.unrotated(g)).float().square()))
            values.register_hook(lambda g: self.value_weights.append(_tokens(g).float().square()))


def _tokens(vectors: Tensor) -> Tensor:
    """`[1, H, n, D]` as `[n - SINKS, H, D]`, a copy."""
    return vectors[0, :, SINKS:].transpose(0, 1).contiguous()


def balance(weights: Tensor) -> Tensor:
    """Scale weights `[..., n]` to mean 1; they span many decades, so the largest thousandth is cut off first."""
    highest = weights.kthvalue(max(1, int(0.999 * weights.shape[-1])), dim=-1, keepdim=True).values
    cut = torch.minimum(weights, highest)
    mean = cut.mean(dim=-1, keepdim=True)
    return torch.where(mean > 0, cut / mean.clamp_min(torch.finfo(cut.dtype).tiny), torch.ones_like(cut))
