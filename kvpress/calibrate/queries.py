# SPDX-License-Identifier: Apache-2.0
"""Calibration of `expected_attention_stats`: mean and covariance of queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvpress.calibrate.run import Observed
from kvpress.core.checks import Size, check_fields
from kvpress.core.model import ModelFacts
from kvpress.observe.queries import QueryStats
from kvpress.presses.expected_attention_stats import METHOD


@dataclass(frozen=True)
class QuerySettings(Observed):
    """Statistics of the queries before their rotary embedding, without the first `n_sink` of each sequence.

    A layer gives `mean [Hq, D]` and `covariance [Hq, D, D]`, float32, for `expected_attention_stats`.
    """

    n_sink: Size = 4
    """Tokens left out at the start of each sequence."""

    method: ClassVar[str] = METHOD

    @property
    def shortest(self) -> int:
        return self.n_sink + 1

    def check(self, model: ModelFacts) -> None:
        del model
        check_fields(self)

    def observer(self) -> QueryStats:
        return QueryStats(self.n_sink)

    def tensors(self, observed: QueryStats) -> dict[str, Tensor]:
        mean, covariance = observed.moments([0])
        return {"mean": mean[0], "covariance": covariance[0]}
