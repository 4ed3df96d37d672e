# SPDX-License-Identifier: Apache-2.0
"""Calibration of `oscar`: rotations from the covariance of queries, and of values by the attention that their keys get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.pairs import SINKS
from kvpress.calibrate.run import Observed
from kvpress.core.model import ModelFacts
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer
from kvpress.quant.oscar import METHOD, basis_of


@dataclass(frozen=True)
class RotationSettings(Observed):
    """Rotations of keys by the covariance of queries, and of values by that of values that get attention, for `oscar`.

    The first tokens of each sequence are ignored. A layer gives `keys` and `values [D, D]`, float32, orthonormal.
    """

    method: ClassVar[str] = METHOD
    keeps_pairs: ClassVar[bool] = True

    @property
    def shortest(self) -> int:
        return SINKS + 1

    def check(self, model: ModelFacts) -> None:
        for layer in model.growing:
            if layer.value_dim is not None:
                raise NotImplementedError(f"{model.name} caches latents, which have no values to rotate")

    def observer(self) -> PairsAndQueries:
        return PairsAndQueries()

    def tensors(self, observed: PairsAndQueries) -> dict[str, Tensor]:
        keys, values = observed.covariances()
        return {"keys": basis_of(keys), "values": basis_of(values)}


class PairsAndQueries(Observer):
    """Copies keys and values of real tokens, `[n, H, D]`, and sums products of queries, `gram [H, D, D]`, float64."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.gram: Tensor | None = None
        self.queries = 0
        """Number of queries of each KV head."""

    def observe(self, call: LayerCall) -> None:
        if call.written is None:
            raise ValueError(f"{type(call.layer.module).__name__} wrote nothing into its cache")
        keys, values = (side.detach()[0, :, SINKS:].transpose(0, 1).contiguous() for side in call.written)
        self.keys.append(keys)
        self.values.append(values)
        queries = call.queries.detach()[0, :, SINKS:].double().unflatten(0, (keys.shape[1], -1)).flatten(1, 2)
        gram = queries.mT @ queries
        self.gram = gram if self.gram is None else self.gram + gram
        self.queries += queries.shape[1]

    def covariances(self) -> tuple[Tensor, Tensor]:
        """Return the covariances of `OscarPress` for keys and for values, float64 `[D, D]` each.

        Raises:
            ValueError: nothing was observed.
        """
        if self.gram is None:
            raise ValueError("no queries have been observed yet")
        of_heads = self.gram / self.queries
        keys, values = (torch.cat(side).double().transpose(0, 1) for side in (self.keys, self.values))
        weights = (keys @ of_heads * keys).sum(dim=2, keepdim=True)
        weights = weights / weights.mean(dim=1, keepdim=True).clamp_min(1e-12)
        return of_heads.mean(dim=0), ((values * weights).mT @ values / values.shape[1]).mean(dim=0)
