# SPDX-License-Identifier: Apache-2.0
"""A sample of a sequence's queries, at even distances, and their logits."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.cache.attention import group_queries
from kvpress.observe.call import LayerCall

SAMPLED_QUERIES = 64
"""Queries that are sampled from each sequence, and so its smallest length."""


def query_positions(total: int, device: torch.device) -> Tensor:
    """Return the ascending positions of the sampled queries among `total` tokens: the ends of equally long parts."""
    return torch.arange(SAMPLED_QUERIES, device=device) * total // SAMPLED_QUERIES + total // SAMPLED_QUERIES - 1


def written_pairs(call: LayerCall) -> tuple[Tensor, Tensor]:
    """Return the keys and values `[1, H, T, D]` that a pass wrote into an empty cache; latents are expanded."""
    call.need("queries, whose attention is compared,")
    assert call.written is not None  # noqa: S101 - for type checkers
    return call.written if call.layer.expand is None else call.layer.expand(*call.written)


def logits_of(call: LayerCall, keys: Tensor, positions: Tensor) -> Tensor:
    """Return the logits of the queries at `positions [n]`, float32 `[H, G, n, T]`; -inf for later keys."""
    heads, total = keys.shape[1:3]
    logits = call.logits(group_queries(call.queries[:, :, positions], heads), keys.flatten(0, 1))
    future = torch.arange(total, device=keys.device) > positions[:, None]
    return logits.view(heads, -1, len(positions), total).masked_fill(future, -torch.inf)
