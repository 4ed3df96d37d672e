# SPDX-License-Identifier: Apache-2.0
"""Calibration of `qfilter`: the main direction of each head's queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.run import Observed
from kvpress.core.model import ModelFacts
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer
from kvpress.presses.qfilter import METHOD


@dataclass(frozen=True)
class FilterSettings(Observed):
    """Minus the first right singular vector of the rotated queries, averaged over the query heads of a KV head.

    A layer gives `filter [H, D]`, float32, for `qfilter`.
    """

    method: ClassVar[str] = METHOD

    def check(self, model: ModelFacts) -> None:
        del model

    def observer(self) -> QuerySquares:
        return QuerySquares()

    def tensors(self, observed: QuerySquares) -> dict[str, Tensor]:
        return {"filter": -observed.directions()}


class QuerySquares(Observer):
    """Sums over the rotated queries of real tokens: `total [Hq, D]` and `gram [Hq, D, D]`, float64, with `heads` KV heads."""

    def __init__(self) -> None:
        self.heads = 1
        self.total: Tensor | None = None
        self.gram: Tensor | None = None

    def observe(self, call: LayerCall) -> None:
        queries, self.heads = call.queries.transpose(1, 2).double(), call.store.heads
        if call.tokens.mask is not None:
            queries = queries * call.tokens.mask[:, -queries.shape[1] :, None, None].to(queries.device)
        total, gram = queries.sum(dim=(0, 1)), torch.einsum("bnhd,bnhe->hde", queries, queries)
        self.total = total if self.total is None else self.total + total
        self.gram = gram if self.gram is None else self.gram + gram

    def directions(self) -> Tensor:
        """Return unit vectors along the queries, averaged over the query heads of a KV head, `[H, D]`, float32.

        Raises:
            ValueError: no queries were observed.
        """
        if self.total is None or self.gram is None:
            raise ValueError("no queries have been observed yet")
        first = torch.linalg.eigh(self.gram.cpu()).eigenvectors[..., -1]
        sign = torch.where((first * self.total.cpu()).sum(dim=1, keepdim=True) < 0, -1.0, 1.0)
        per_query_head: Tensor = (first * sign).unflatten(0, (self.heads, -1))
        return per_query_head.mean(dim=1).float()
