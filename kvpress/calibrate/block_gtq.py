# SPDX-License-Identifier: Apache-2.0
"""Calibration of `block_gtq`: mean squares of channel pairs of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.pairs import SINKS
from kvpress.calibrate.run import Observed
from kvpress.core.model import ModelFacts
from kvpress.kernels import per_pair
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer
from kvpress.quant.block_gtq import METHOD, pairs_of
from kvpress.quant.calibrated import check_rotates_halves


@dataclass(frozen=True)
class EnergySettings(Observed):
    """Mean square of every pair of channels of queries and keys, for the bits of `block_gtq`.

    The first tokens of each sequence are ignored. A layer gives, float32, `keys [H, D / 2]`, `queries [H, D / 2]`, the mean
    over the query heads of a KV head, and `rotated [1]`, the number of rotated channels. A pair is a channel of the first half
    of the rotated channels with its partner in the second half; the pairs of the unrotated channels follow.
    """

    method: ClassVar[str] = METHOD

    @property
    def shortest(self) -> int:
        return SINKS + 1

    def check(self, model: ModelFacts) -> None:
        for layer in model.growing:
            check_rotates_halves(layer)

    def observer(self) -> PairEnergies:
        return PairEnergies()

    def tensors(self, observed: PairEnergies) -> dict[str, Tensor]:
        means = {name: (total / observed.count).float() for name, total in observed.totals.items()}
        return means | {"rotated": torch.tensor([float(observed.rotated)])}


class PairEnergies(Observer):
    """Sums of squares of channel pairs over `count` tokens: `totals [H, D / 2]` by name, rotated pairs first."""

    def __init__(self) -> None:
        self.count = self.rotated = 0
        self.totals: dict[str, Tensor] = {}

    def observe(self, call: LayerCall) -> None:
        if call.written is None:
            raise ValueError(f"{type(call.layer.module).__name__} wrote nothing into its cache")
        keys, embeddings = call.written[0], call.position_embeddings
        self.rotated = 2 * per_pair(embeddings[0][0]).shape[-1] if call.layer.rotates and embeddings is not None else 0
        pairs = pairs_of(keys.shape[3], self.rotated).to(keys.device)
        self.count += keys.shape[2] - SINKS
        for name, vectors in {"queries": call.queries, "keys": keys}.items():
            squares = vectors[0, :, SINKS:].detach().double().square().sum(dim=1).unflatten(0, (keys.shape[1], -1))
            self.totals[name] = self.totals.get(name, 0) + squares.mean(dim=1)[:, pairs].sum(dim=2)
