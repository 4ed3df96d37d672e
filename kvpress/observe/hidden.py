# SPDX-License-Identifier: Apache-2.0
"""Observer of hidden states that enter attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer
from kvpress.observe.queries import append_real, new_real_tokens


class HiddenStates(Observer):
    """Attention input `states [B, n, hidden]` of the newest `size` real tokens; with `prompt`, of the whole prompt.

    A row with fewer real tokens has `padding [B]` columns before them; None if no row has any. Used only by presses that score
    from hidden states, as presses written for NVIDIA kvpress may. If tokens were read without the press, the states of tokens
    before them are dropped.
    """

    state_names = ("states", "padding")
    padding: Tensor | None = None

    def __init__(self, size: int, prompt: bool) -> None:
        self.size, self.prompt = size, prompt
        self.states: Tensor | None = None
        self.end = 0

    def observe(self, call: LayerCall) -> None:
        old = self.states if call.tokens.seen_before == self.end else None
        self.end = call.tokens.seen_before + call.hidden_states.shape[1]
        padding, real = None if old is None else self.padding, new_real_tokens(call)
        states = call.hidden_states if old is None else torch.cat([old, call.hidden_states], dim=1)
        size = self.size if call.phase == "decode" or not self.prompt else None
        if real is not None or padding is not None:
            earlier, new = None if old is None else old[:, None], call.hidden_states[:, None]
            joint, padding = append_real(earlier, padding, new, real, states.shape[1] if size is None else size)
            states = joint[:, 0]
        elif size is not None:
            states = states[:, -size:].clone()
        self.states, self.padding = states, padding

    def row_padding(self) -> list[int] | None:
        return None if self.padding is None else self.padding.tolist()

    def joined(self, observers: Sequence[Any], seen: int) -> Any:
        twin = super().joined(observers, seen)
        twin.end = seen
        return twin
