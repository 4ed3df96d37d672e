# SPDX-License-Identifier: Apache-2.0
"""Masked diffusion in plain code: passes of transformers with a mask that hides padding only, and an explicit cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

MASK = 96
"""Id of the mask token."""

Keep = Callable[[Tensor, Tensor], Tensor]
"""Returns the kept columns `[m]` from keys `[B, H, n, D]` and the columns `[n]` around a block."""


class BlockPairs(DynamicCache):
    """Cache of the pairs around a block; `update` returns them with the block's pairs, which it does not store."""

    def __init__(self, first: int, stop: int, keep: Keep | None = None) -> None:
        super().__init__()
        self.first, self.stop, self.keep = first, stop, keep
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx not in self.stored:
            columns = torch.arange(key_states.shape[2])
            columns = columns[(columns < self.first) | (columns >= self.stop)]
            if self.keep is not None:
                columns = self.keep(key_states[:, :, columns], columns)
            self.stored[layer_idx] = key_states[:, :, columns], value_states[:, :, columns]
            return key_states, value_states
        pairs = zip(self.stored[layer_idx], (key_states, value_states), strict=True)
        return tuple(torch.cat(pair, dim=2) for pair in pairs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def read(model: Any, ids: Tensor, seen: int, first: int = 0, cache: Any = None) -> Tensor:
    """Return the logits of `ids [1, n]` from column `first` on, which attend to `seen` pairs."""
    mask = torch.zeros(1, 1, ids.shape[1], seen)
    positions = torch.arange(first, first + ids.shape[1])[None]
    return model(
        ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=cache is not None
    ).logits


@torch.no_grad()
def write(
    model: Any,
    prompt: Tensor,
    new: int,
    block: int,
    steps: int,
    cache: str = "none",
    keep: Keep | None = None,
    full: int = 1,
) -> Tensor:
    """Write `new` tokens after one `prompt [n]`, block by block, equally many tokens in each step."""
    ids = torch.cat([prompt, torch.full((new,), MASK)])[None]
    for first in range(len(prompt), ids.shape[1], block):
        stop = min(first + block, ids.shape[1])
        pairs = None
        for step in range(min(steps, stop - first)):
            end = ids.shape[1] if cache == "prefix" else stop
            if cache == "none" or step < full:
                pairs = None if cache == "none" else BlockPairs(first, end, keep)
                logits = read(model, ids, ids.shape[1], cache=pairs)[0, first:stop]
            else:
                assert pairs is not None
                seen = pairs.stored[0][0].shape[2] + end - first
                logits = read(model, ids[:, first:end], seen, first, pairs)[0, : stop - first]
            logits[:, MASK] = -torch.inf
            confidence, tokens = logits.double().softmax(dim=-1).max(dim=-1)
            masked = ids[0, first:stop] == MASK
            remaining = min(steps, stop - first) - step
            share = -(-int(masked.sum()) // remaining)
            chosen = confidence.masked_fill(~masked, -1).argsort(descending=True, stable=True)[:share]
            ids[0, first + chosen] = tokens[chosen]
    return ids[0, len(prompt) :]
