# SPDX-License-Identifier: Apache-2.0
"""Attention to stored pairs and new ones that autograd can differentiate by queries, keys, values and log-weights."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.cache.attention import group_queries
from kvpress.observe.call import LayerCall
from kvpress.observe.view import LOG_WEIGHT, View, view_groups


def attend_with_graph(call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the output `[B, Q, Hq, Dv]` of `query [B, Hq, Q, D]` over the stored pairs of a layer and the new ones.

    New keys `[B, H, Q, D]` and values `[B, H, Q, Dv]` are not in the store; attention is causal among them. Dense stored
    pairs may require gradients; encoded ones are constants. Each view of pairs has its own logits `[b, h, G * Q, n + Q]`, which
    the graph retains.
    """
    batch, heads, length = key.shape[:3]
    outputs: dict[tuple[int, int], Tensor] = {}
    for group in view_groups(call):
        for view in group:
            start, stop, _ = view.heads.indices(heads)
            result = _attend(call, view, query, key, value)
            for i, row in enumerate(view.rows):
                for head in range(start, stop):
                    outputs[row, head] = result[i, head - start]
    rows = [torch.cat([outputs[row, head] for head in range(heads)]) for row in range(batch)]
    return torch.stack(rows).view(batch, query.shape[1], length, -1).transpose(1, 2)


def _attend(call: LayerCall, view: View, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the output `[b, h, G, Q, Dv]` of the rows and heads of one view."""
    heads, length = key.shape[1], key.shape[2]
    grouped = group_queries(query, heads).view(key.shape[0], heads, -1, query.shape[-1])[view.rows][:, view.heads]
    new_keys, new_values = key[view.rows][:, view.heads], value[view.rows][:, view.heads]
    keys = torch.cat([view.keys.to(key.dtype), new_keys], dim=2)
    values = torch.cat([view.values.to(value.dtype), new_values], dim=2)
    logits = call.logits(grouped, keys).unflatten(2, (-1, length))
    if LOG_WEIGHT in view.side:
        weight = view.side[LOG_WEIGHT].float()
        weight = torch.cat([weight, weight.new_zeros(*weight.shape[:2], length)], dim=2)
        logits = logits + weight[:, :, None, None]
    future = torch.ones(length, keys.shape[2], dtype=torch.bool, device=key.device).triu(view.length + 1)
    logits = logits.masked_fill(future, -torch.inf)
    if call.sinks is not None:
        extra = call.sinks.float().view(heads, -1)[view.heads][None, :, :, None, None]
        logits = torch.cat([logits, extra.expand(*logits.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : keys.shape[2]]
    return weights @ values.float()[:, :, None]
