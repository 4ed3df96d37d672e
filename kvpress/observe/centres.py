# SPDX-License-Identifier: Apache-2.0
"""Observer of the mean query before rotation, and the mean length of its rotary pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.cache import attention
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer
from kvpress.observe.queries import passes


class QueryCentres(Observer):
    """Sums over all real tokens of the queries before rotation, `total [B, Hq, D]`, and of `pair_sizes`, `sizes [B, Hq, D]`.

    `count [B]` is the number of tokens; all float32.
    """

    state_names = ("count", "total", "sizes")

    def __init__(self) -> None:
        self.count: Tensor | None = None
        self.total: Tensor | None = None
        self.sizes: Tensor | None = None

    def observe(self, call: LayerCall) -> None:
        batch, heads, length, dim = call.queries.shape
        if self.count is None or self.total is None or self.sizes is None:
            device = call.queries.device
            self.count = torch.zeros(batch, device=device)
            self.total, self.sizes = (torch.zeros(batch, heads, dim, device=device) for _ in range(2))
        real = torch.ones(batch, length) if call.tokens.mask is None else call.tokens.mask[:, -length:].float()
        real = real.to(call.queries.device)
        self.count = self.count + real.sum(dim=1)
        for part in passes(call, max(1, attention.BLOCK_BYTES // (12 * batch * heads * dim))):
            counted, real = real[:, None, : part.queries.shape[2], None], real[:, part.queries.shape[2] :]
            queries = part.unrotated(part.queries.float())
            self.total = self.total + (queries * counted).sum(dim=2)
            self.sizes = self.sizes + (pair_sizes(part, queries, self._like(part)) * counted).sum(dim=2)

    @staticmethod
    def _like(call: LayerCall) -> Tensor | None:
        embeddings = call.position_embeddings
        return None if embeddings is None else embeddings[0]

    def means(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Return the mean query and the mean pair sizes, `[b, Hq, D]` each, of some batch rows."""
        if self.count is None or self.total is None or self.sizes is None:
            raise ValueError("no queries have been observed yet")
        count = self.count[rows].clamp_min(1)[:, None, None]
        return self.total[rows] / count, self.sizes[rows] / count


def pair_sizes(call: LayerCall, vectors: Tensor, like: Tensor | None) -> Tensor:
    """Return for every channel of `vectors [B, heads, n, D]` the length of its rotary pair, float32.

    Rotating by 90 degrees maps each channel to its partner, in any layout of the model. A channel that is not rotated
    is a pair by itself. `like [B, n, d]` is a cosine of the rotary embedding; None without one.
    """
    vectors = vectors.float()
    if like is None or not call.layer.rotates:
        return vectors.abs()
    zero = torch.zeros_like(like, dtype=torch.float32)
    partner = call.rotate(vectors, zero, zero + 1) - call.rotate(vectors, zero, zero)
    return torch.hypot(vectors, partner)


def pair_weights(call: LayerCall, like: Tensor | None, dim: int) -> Tensor:
    """Return `[D]`: 1/2 for channels of a rotary pair, which counts twice, and 1 for channels that are not rotated."""
    ones = torch.ones(1, 1, 1, dim, device=None if like is None else like.device)
    if like is None or not call.layer.rotates:
        return ones.flatten()
    zero = torch.zeros_like(like[:1, :1], dtype=torch.float32)
    return ((1 + call.rotate(ones, zero, zero)) / 2).flatten()
