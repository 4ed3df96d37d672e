# SPDX-License-Identifier: Apache-2.0
"""Calibration of `double_sparsity`: mean magnitude of every channel."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from kvpress.calibrate.run import Observed
from kvpress.core.calibration import Calibration
from kvpress.core.model import ModelFacts
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer
from kvpress.sparse.channels import METHOD, write_official


@dataclass(frozen=True)
class ChannelSettings(Observed):
    """Mean magnitude of every channel over all tokens, to choose important channels.

    A layer gives, float32, `q [Hq, D]` and `k [H, D]`, the mean of |q| and |k| before their rotary embedding, and
    `qk [Hq, D]`, the mean of |q * k| after it, with q and k of the same token. A file named `.json` holds channels in
    descending order instead, in the format of the authors' code.
    """

    method: ClassVar[str] = METHOD

    def check(self, model: ModelFacts) -> None:
        """Accept every model."""

    def observer(self) -> ChannelMeans:
        return ChannelMeans()

    def tensors(self, observed: ChannelMeans) -> dict[str, Tensor]:
        return {name: total / observed.count for name, total in observed.totals.items()}

    def write(self, result: Calibration, model: ModelFacts, out: Path) -> None:
        if out.suffix == ".json":
            write_official(result, model, out)
        else:
            super().write(result, model, out)


class ChannelMeans(Observer):
    """Sums of magnitudes over `count` tokens: `totals` by name."""

    def __init__(self) -> None:
        self.count = 0
        self.totals: dict[str, Tensor] = {}

    def observe(self, call: LayerCall) -> None:
        queries, keys = call.queries, call.store.window.filled_keys
        groups = queries.shape[1] // keys.shape[1]
        seen = {
            "q": call.unrotated(queries),
            "k": call.unrotated(keys),
            "qk": queries.float() * keys.float().repeat_interleave(groups, dim=1),
        }
        self.count += queries.shape[2]
        for name, vectors in seen.items():
            total = vectors[0].float().abs().sum(dim=1)
            self.totals[name] = self.totals.get(name, 0) + total
