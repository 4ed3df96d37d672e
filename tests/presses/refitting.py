# SPDX-License-Identifier: Apache-2.0
"""The least squares that `refit` and `attention_matching` solve, plainly: whole matrices in float64."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.observe.observer import hashed
from tests.projections import HEADS, KV_HEADS, attention_of, projected

AHEAD = 32


@dataclass
class Head:
    """One KV head of a prompt that was read at once: `queries [M, D]`, and `keys` and `values [T, D]`."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    scale: float
    sinks: Tensor | None

    def shares(self, keys: Tensor, log_weight: Tensor | None = None) -> Tensor:
        """Attention `[M, t]` on some keys, learned sinks counted."""
        logits = self.queries @ keys.double().T * self.scale
        logits = logits if log_weight is None else logits + log_weight.double()
        if self.sinks is None:
            return logits.softmax(dim=-1)
        return torch.cat([logits, self.sinks[:, None]], dim=1).softmax(dim=-1)[:, :-1]

    @property
    def full_outputs(self) -> Tensor:
        """Outputs of the queries with all pairs, `[M, D]`."""
        return self.shares(self.keys) @ self.values

    def masses(self, keys: Tensor) -> Tensor:
        """Weight of every key among all pairs, sinks left out, `[M, t]`."""
        total = (self.queries @ self.keys.T * self.scale).logsumexp(dim=-1, keepdim=True)
        return (self.queries @ keys.double().T * self.scale - total).exp()

    def refitted(self, keys: Tensor, values: Tensor, ridge: float, log_weight: Tensor | None = None) -> Tensor:
        """Least-squares values `[t, D]` of kept pairs, whose values are `values` before the refit."""
        shares = self.shares(keys, log_weight)
        return values.double() + ridged(shares, self.full_outputs - shares @ values.double(), ridge)


def ridged(design: Tensor, outputs: Tensor, ridge: float) -> Tensor:
    """Least squares of `outputs` with `ridge` mean diagonals of the Gram matrix, by stacking a multiple of the identity."""
    mean = design.square().sum() / design.shape[1]
    stacked = torch.cat([design, (ridge * mean).sqrt() * torch.eye(design.shape[1], dtype=design.dtype)])
    nothing = outputs.new_zeros(design.shape[1], outputs.shape[1])
    return torch.linalg.lstsq(stacked, torch.cat([outputs, nothing]), driver="gelsd").solution


def heads(model: Any, ids: Tensor, layer: int) -> list[Head]:
    """Queries and pairs of every stream of a tiny layer; queries take the positions of the next 32 tokens in turn."""
    module = model.get_decoder().layers[layer].self_attn
    length, cache = ids.shape[1], DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        queries = projected(model, ids, layer)["q"]
    longer = torch.cat([ids, ids[:, :1].expand(-1, AHEAD)], dim=1)
    cos, sin = attention_of(model, longer, layer)["position_embeddings"]
    order = hashed(torch.arange(length)).argsort()
    at = length + torch.arange(length) % AHEAD
    turn = sys.modules[type(module).__module__].apply_rotary_pos_emb
    turned = turn(queries[:, :, order], queries[:, :, order], cos[:, at], sin[:, at])[0].double()
    groups, all_heads = HEADS // KV_HEADS, []
    for row in range(len(ids)):
        for head in range(KV_HEADS):
            group = slice(head * groups, (head + 1) * groups)
            sinks = getattr(module, "sinks", None)
            head_sinks = None if sinks is None else sinks[group].detach().double().repeat_interleave(length)
            keys, values = (side[row, head].double() for side in (cache.layers[layer].keys, cache.layers[layer].values))
            all_heads.append(Head(turned[row, group].flatten(0, 1), keys, values, module.scaling, head_sinks))
    return all_heads


def stored(cache: Any, layer: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Slots, keys, values and log-weights of every stream of a layer, as they are read."""
    segments, streams = cache.layers[layer].store.sealed, []
    for n in range(segments[0].layout.streams):
        rows = [segment.layout.rows(n) for segment in segments]
        read = [segment.read(span) for segment, span in zip(segments, rows, strict=True)]
        weights = [
            torch.zeros(span.stop - span.start) if segment.log_weight is None else segment.log_weight[span].float()
            for segment, span in zip(segments, rows, strict=True)
        ]
        slots = torch.cat([segment.slots()[span].long() for segment, span in zip(segments, rows, strict=True)])
        streams.append((slots, torch.cat([k for k, _ in read]), torch.cat([v for _, v in read]), torch.cat(weights)))
    return streams


def read(model: Any, spec: str, ids: Tensor, mask: Tensor | None = None, cache: Any = None) -> Any:
    """The cache of a prompt under a press."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    at = None if mask is None else (mask.cumsum(dim=1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    with torch.no_grad(), kvpress.get_press(spec)(model):
        model(ids, attention_mask=mask, position_ids=at, past_key_values=cache)
    return cache
