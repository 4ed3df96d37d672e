# SPDX-License-Identifier: Apache-2.0
"""Scores that small networks compute from hidden states, recorded with the pairs of each token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.core.linear import plain_weight
from kvpress.core.model import LayerFacts
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer
from kvpress.presses.criticalkv import output_layer


def input_size(layer: LayerFacts) -> int | None:
    """Return the size of a layer's hidden states; None if neither its output projection nor its configuration has it."""
    output = output_layer(layer.module)
    if (weight := plain_weight(output)) is not None:
        return int(weight.shape[0])
    declared = getattr(getattr(layer.module, "config", None), "hidden_size", None)
    size = getattr(output, "out_features", declared)
    return size if isinstance(size, int) else None


class Gates(Observer, ABC):
    """Observer that records one number per pair when its token is read, computed by the networks at the path `place`.

    Scores therefore need no hidden states of earlier tokens, and do not change while tokens are generated. Subclasses define
    `values`.
    """

    lasts = True
    name: ClassVar[str]

    def __init__(self, place: str) -> None:
        self.place = place
        self.sides = (f"{self.name} of {place}",)

    @abstractmethod
    def values(self, hidden: Tensor, layer: int) -> Tensor:
        """Return the outputs `[B, n, H]` of the networks of a layer for `hidden [B, n, hidden]`."""

    def observe(self, call: LayerCall) -> None:
        window, (name,) = call.store.window, self.sides
        with torch.no_grad():
            values = self.values(call.hidden_states, call.layer.index)
            new = call.layer.shards.part(values, 2).transpose(1, 2).float()
        old: Any = window.side.get(name)
        shape = (*new.shape[:2], window.length)
        recorded = torch.zeros(shape, device=new.device) if old is None else old.clone()
        recorded[..., window.length - new.shape[2] :] = new
        window.side[name] = recorded
