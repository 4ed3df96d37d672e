"""What a pattern is: which blocks of keys the queries of a prompt read."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kvpress.cache.attention import Partial
from kvpress.cache.tiles import attend_tiles
from kvpress.observe.call import LayerCall


class Pattern(ABC):
    """Chooses, while a prompt is read, which tiles of `block` queries by `block` keys attention computes.

    It takes the place of the model's own attention where several tokens come and nothing of the layer is sealed yet. A tile
    that holds a query itself is always read; tiles of the future never are.
    """

    block: int = 64

    @abstractmethod
    def tiles(self, call: LayerCall, keys: Tensor) -> Tensor:
        """Return which tiles of `keys [B, H, T, D]` the queries of a call read.

        They are bool `[B, Hq, ceil(Q / block), ceil(T / block)]`; query tile i holds the tokens from `T - Q + i * block`.
        """

    def attend(self, call: LayerCall, keys: Tensor, values: Tensor) -> Partial:
        """Attend from the queries of a call, `[B, Hq, Q, D]`: outputs `[B, Hq, Q, Dv]` and log-sum-exp, sinks included."""
        out, lse = attend_tiles(call.queries, keys, values, self.tiles(call, keys), self.block, call.logits, call.mask)
        if call.sinks is None:
            return out, lse
        whole = torch.logaddexp(lse, call.sinks.float().view(1, -1, 1).to(lse.device))
        return out * torch.exp(lse - whole)[..., None], whole
