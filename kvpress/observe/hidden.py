# SPDX-License-Identifier: Apache-2.0
"""Observer of hidden states that enter attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer


class HiddenStates(Observer):
    """Attention input `states [B, n, hidden]` of the newest `size` tokens; with `prompt`, of the whole prompt.

    Used only by presses that score from hidden states, as presses written for NVIDIA kvpress may. If tokens were read without
    the press, the states of tokens before them are dropped.
    """

    state_names = ("states",)

    def __init__(self, size: int, prompt: bool) -> None:
        self.size, self.prompt = size, prompt
        self.states: Tensor | None = None
        self.end = 0

    def observe(self, call: LayerCall) -> None:
        old = self.states if call.tokens.seen_before == self.end else None
        self.end = call.tokens.seen_before + call.hidden_states.shape[1]
        self.states = call.hidden_states if old is None else torch.cat([old, call.hidden_states], dim=1)
        if call.phase == "decode" or not self.prompt:
            self.states = self.states[:, -self.size :].clone()

    def joined(self, observers: Sequence[Any], seen: int) -> Any:
        twin = super().joined(observers, seen)
        twin.end = seen
        return twin
