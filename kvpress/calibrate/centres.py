# SPDX-License-Identifier: Apache-2.0
"""Calibration of `triattention`: mean queries before their rotary embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvpress.calibrate.run import Observed
from kvpress.core.model import ModelFacts
from kvpress.observe.centres import QueryCentres
from kvpress.presses.triattention import METHOD


@dataclass(frozen=True)
class CentreSettings(Observed):
    """Mean queries before their rotary embedding, and mean lengths of their rotary pairs.

    A layer gives `mean [Hq, D]` and `size [Hq, D]`, float32, for `triattention`.
    """

    method: ClassVar[str] = METHOD

    def check(self, model: ModelFacts) -> None:
        """Accept every model."""

    def observer(self) -> QueryCentres:
        return QueryCentres()

    def tensors(self, observed: QueryCentres) -> dict[str, Tensor]:
        mean, size = observed.means([0])
        return {"mean": mean[0], "size": size[0]}
