# SPDX-License-Identifier: Apache-2.0
"""Recording keys, values and their importance, to fit the tables of codecs."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.run import Observed
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer

SINKS = 4
"""Tokens at the start of each sequence that are ignored: their keys are outliers, and codecs leave them dense."""


class FitsPairs(Observed):
    """Base of methods that fit tables to the keys and values of texts.

    All keys and values of a layer are in memory while its tables are fitted, so that layers are fitted group by group.
    """

    fisher: bool
    """Whether every key and value is weighted by its squared gradient of the loss."""

    keeps_pairs: ClassVar[bool] = True

    @property
    def gradients(self) -> bool:
        return self.fisher

    def observer(self) -> PairRecorder:
        return PairRecorder(self.fisher)


class PairRecorder(Observer):
    """Copies the keys before their rotary embedding, and the values, that a layer writes: `[tokens, H, D]`.

    With `gradients`, it also records their squared gradients.
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
    """Copy `[1, H, n, D]` to `[n - SINKS, H, D]`."""
    return vectors[0, :, SINKS:].transpose(0, 1).contiguous()


def balance(weights: Tensor) -> Tensor:
    """Scale weights `[..., n]` to mean 1, after the largest thousandth is clipped: weights span many decades."""
    highest = weights.kthvalue(max(1, int(0.999 * weights.shape[-1])), dim=-1, keepdim=True).values
    cut = torch.minimum(weights, highest)
    mean = cut.mean(dim=-1, keepdim=True)
    return torch.where(mean > 0, cut / mean.clamp_min(torch.finfo(cut.dtype).tiny), torch.ones_like(cut))
