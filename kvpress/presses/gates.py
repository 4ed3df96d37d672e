# SPDX-License-Identifier: Apache-2.0
"""What small networks say of each token from its hidden state, recorded beside its pairs as it is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.core.model import LayerFacts
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer
from kvpress.presses.criticalkv import output_weight


def input_size(layer: LayerFacts) -> int | None:
    """Return the size of a layer's hidden states; None where it cannot be told."""
    weight = None if layer.module is None else output_weight(layer.module)
    return None if weight is None else int(weight.shape[0])


class Gates(Observer, ABC):
    """Records a number for every pair when its token is read; subclasses say which, by the networks at `place`.

    So scores neither need the hidden states of earlier tokens nor change while tokens are generated.
    """

    name: ClassVar[str]

    def __init__(self, place: str) -> None:
        self.place = place
        self.sides = (f"{self.name} of {place}",)

    @abstractmethod
    def values(self, hidden: Tensor, layer: int) -> Tensor:
        """Return what the networks of a layer say of `hidden [B, n, hidden]`: `[B, n, H]`."""

    def observe(self, call: LayerCall) -> None:
        window, (name,) = call.store.window, self.sides
        with torch.no_grad():
            new = self.values(call.hidden_states, call.layer.index).transpose(1, 2).float()
        old: Any = window.side.get(name)
        shape = (*new.shape[:2], window.length)
        recorded = torch.zeros(shape, device=new.device) if old is None else old.clone()
        recorded[..., window.length - new.shape[2] :] = new
        window.side[name] = recorded
