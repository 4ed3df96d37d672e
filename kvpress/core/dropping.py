# SPDX-License-Identifier: Apache-2.0
"""Token dropping: later layers skip tokens of a prompt, chosen by the attention that the tokens get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.observe.call import LayerCall
from kvpress.observe.spans import SpanRule

QUERIES = 64
"""Queries per block of attention weights."""


@dataclass(frozen=True)
class Reached:
    """The m tokens of a prompt that have reached a layer."""

    call: LayerCall
    """Call of the layer."""
    free: Tensor
    """Mask `[B, m]` of the tokens that may be dropped, on the device of the keys."""
    real: Tensor
    """Mask `[B, m]` of the tokens that are not padding, on the device of the keys."""

    def attention(self, at: Tensor) -> Tensor:
        """Return causal attention weights `[B, w, m]` of the queries at columns `at [w]`, mean over heads, float32."""
        store, keys = self.call.store, self.call.store.window.filled_keys
        queries = self.call.queries.index_select(2, at)
        grouped = queries.reshape(store.batch, store.heads, -1, queries.shape[-1])
        scores = self.call.logits(grouped, keys).view(store.batch, store.heads, -1, len(at), keys.shape[2])
        seen = torch.arange(keys.shape[2], device=at.device) <= at[:, None]
        scores = scores.masked_fill(~(seen & self.real[:, None])[:, None, None], -torch.inf).flatten(0, 1)
        weights = self.call.softmax(scores).nan_to_num(0.0)
        per_head: Tensor = weights.unflatten(0, (store.batch, -1))
        return self.call.layer.shards.mean(per_head.mean(dim=(1, 2)))

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the attention `[B, w, m]` of all tokens in blocks of `w`, and the mask `[B, w]` of real tokens not free."""
        for at in torch.arange(self.free.shape[1], device=self.free.device).split(QUERIES):
            yield self.attention(at), (self.real & ~self.free)[:, at]


@dataclass(frozen=True)
class Entering:
    """The T tokens of a first prompt, before the first layer."""

    states: Tensor
    """Hidden states `[B, T, n]`."""
    free: Tensor
    """Mask `[B, T]` of the tokens that may be merged into others."""
    cells: Tensor
    """Picture, frame, row and column of each token, `[B, T, 4]`; `UNKNOWN` for text (`kvpress.observe.pictures`)."""


@dataclass(frozen=True)
class Dropping:
    """Tokens of a first prompt that later layers skip."""

    rule: SpanRule
    """Spans of the tokens that may be dropped or merged."""
    layers: tuple[int, ...]
    """Attention layers after which tokens are dropped."""
    keep: Callable[[Reached], Tensor]
    """Returns the mask `[B, m]` of the tokens to keep after a layer; values outside of free tokens are ignored."""
    cut: bool = False
    """From the first to the last of `layers`, the cache keeps only the tokens that passed all of them."""
    merge: Callable[[Entering], Tensor] | None = None
    """Returns, before the first layer, the column `[B, T]` that each token is merged into, its own for none.

    All layers skip tokens that were merged into another one, whose hidden state becomes the mean of all of them.
    """

    @property
    def first(self) -> int:
        """First layer at which tokens go: 0 if tokens are merged before it, else the first of `layers`."""
        return 0 if self.merge is not None else min(self.layers)
