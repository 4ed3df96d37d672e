# SPDX-License-Identifier: Apache-2.0
"""Calibration of `loki`: principal components of the keys of each head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.run import Observed
from kvpress.core.model import ModelFacts
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer
from kvpress.sparse.loki import METHOD, principal


@dataclass(frozen=True)
class KeyDirectionSettings(Observed):
    """Directions of the largest variance of the keys of every head, for `loki`.

    A layer gives `rotated` and `unrotated [H, D, D]`, float32: orthonormal columns by falling variance, of keys after and
    before their rotary embedding.
    """

    method: ClassVar[str] = METHOD

    def check(self, model: ModelFacts) -> None:
        """Accept every model."""

    def observer(self) -> KeySums:
        return KeySums()

    def tensors(self, observed: KeySums) -> dict[str, Tensor]:
        return {name: principal(scatter).float() for name, scatter in observed.scatters().items()}


class KeySums(Observer):
    """Sums over the keys of `count` tokens by name: `totals [H, D]` and their `products [H, D, D]`, float64."""

    def __init__(self) -> None:
        self.count = 0
        self.totals: dict[str, Tensor] = {}
        self.products: dict[str, Tensor] = {}

    def observe(self, call: LayerCall) -> None:
        keys = call.store.window.filled_keys
        self.count += keys.shape[2]
        for name, seen in {"rotated": keys, "unrotated": call.unrotated(keys)}.items():
            vectors = seen[0].double()
            self.totals[name] = self.totals.get(name, 0) + vectors.sum(dim=1)
            self.products[name] = self.products.get(name, 0) + vectors.mT @ vectors

    def scatters(self) -> dict[str, Tensor]:
        """Return the covariance of the keys times their number, by name, `[H, D, D]`, float64."""
        return {
            name: self.products[name] - torch.einsum("hd,he->hde", total, total) / self.count
            for name, total in self.totals.items()
        }
