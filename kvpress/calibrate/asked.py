# SPDX-License-Identifier: Apache-2.0
"""Some queries of a sequence, at even distances, and what they give the keys before them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.cache.attention import group_queries
from kvpress.observe.call import LayerCall

ASKED = 64
"""Queries of each sequence that are looked at; no method takes shorter ones."""


def places(total: int, device: torch.device) -> Tensor:
    """Where the queries stand among so many tokens, ascending; the last of them closes a part of equal length."""
    return torch.arange(ASKED, device=device) * total // ASKED + total // ASKED - 1


def written(call: LayerCall) -> tuple[Tensor, Tensor]:
    """Keys and values `[1, H, T, D]` that a pass put into an empty cache, latents turned into such."""
    call.need("queries, whose attention is compared,")
    assert call.written is not None  # noqa: S101 - for type checkers
    return call.written if call.layer.expand is None else call.layer.expand(*call.written)


def logits_of(call: LayerCall, keys: Tensor, at: Tensor) -> Tensor:
    """Logits of the queries at some places, float32 `[H, G, n, T]`; those of later keys are -inf."""
    heads, total = keys.shape[1:3]
    logits = call.logits(group_queries(call.queries[:, :, at], heads), keys.flatten(0, 1))
    future = torch.arange(total, device=keys.device) > at[:, None]
    return logits.view(heads, -1, len(at), total).masked_fill(future, -torch.inf)
