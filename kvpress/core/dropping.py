# SPDX-License-Identifier: Apache-2.0
"""Tokens of a prompt that some layer is the last to be handed: which ones, by the attention that they get there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.observe.call import LayerCall
from kvpress.observe.spans import Spans

QUERIES = 64
"""How many queries attention is worked out for at a time."""


@dataclass(frozen=True)
class Reached:
    """The tokens of a prompt that have reached a layer, whose pass `call` is, and which of them are `free [B, m]` to go.

    `real [B, m]` marks those that are no padding. Neither is on another device than the keys.
    """

    call: LayerCall
    free: Tensor
    real: Tensor

    def attention(self, at: Tensor) -> Tensor:
        """Attention weights `[B, w, m]`, causal, mean over heads, float32, of the queries of the tokens `at [w]`."""
        store, keys = self.call.store, self.call.store.window.filled_keys
        queries = self.call.queries.index_select(2, at)
        grouped = queries.reshape(store.batch, store.heads, -1, queries.shape[-1])
        scores = self.call.logits(grouped, keys).view(store.batch, store.heads, -1, len(at), keys.shape[2])
        seen = torch.arange(keys.shape[2], device=at.device) <= at[:, None]
        scores = scores.masked_fill(~(seen & self.real[:, None])[:, None, None], -torch.inf).flatten(0, 1)
        weights = self.call.softmax(scores).nan_to_num(0.0)
        return weights.unflatten(0, (store.batch, -1)).mean(dim=(1, 2))

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the attention `[B, w, m]` of all tokens, so many at a time, and which of the `w` are text, `[B, w]`."""
        for at in torch.arange(self.free.shape[1], device=self.free.device).split(QUERIES):
            yield self.attention(at), (self.real & ~self.free)[:, at]


@dataclass(frozen=True)
class Entering:
    """The tokens of a first prompt before the first layer: `states [B, T, n]`, and which are `free [B, T]` to be merged.

    `cells [B, T, 4]` are picture, frame, row and column of each, `UNKNOWN` where there are none (`kvpress.observe.pictures`).
    """

    states: Tensor
    free: Tensor
    cells: Tensor


@dataclass(frozen=True)
class Dropping:
    """Which tokens of a first prompt later layers are not handed: those that `rule` names and `keep` does not mark.

    After each of some attention `layers`, `keep` is asked of the tokens that reached it, `[B, m]`; what it says of others than
    the free ones does not matter. With `cut`, the layers from the first to the last of these hold in the end what passed all.
    `merge` is asked before the first layer into which token of its row each is merged, columns `[B, T]`, its own where into
    none: no layer is handed tokens that are merged into others, and these bring the mean of all.
    """

    rule: Spans
    layers: tuple[int, ...]
    keep: Callable[[Reached], Tensor]
    cut: bool = False
    merge: Callable[[Entering], Tensor] | None = None

    @property
    def first(self) -> int:
        """The first layer that is not followed by all tokens: those behind it, or it itself, are handed fewer."""
        return 0 if self.merge is not None else min(self.layers)
