# SPDX-License-Identifier: Apache-2.0
"""Oracle of eviction: full caches in which an explicit mask hides evicted pairs and adds log-weights to the others."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

import kvpress
from kvpress.hf.models import with_cache
from kvpress.testing.models import grow, position_ids

NAME = "kvpress_oracle"


class Oracle:
    """Decodes with all pairs stored, of the first `num_prompt` columns only `kept[layer][row][head]` visible.

    `weights[layer]` `[B, H, num_prompt]` are added to their logits.
    """

    def __init__(
        self, model: Any, kept: list[list[list[Tensor]]], num_prompt: int, weights: dict[int, Tensor] | None = None
    ) -> None:
        self.model, self.kept, self.prompt, self.weights = model, kept, num_prompt, weights or {}

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """Return the attention output `[B, T, Hq, D]` in plain torch; an attention function of transformers."""
        heads, length, kv_heads = query.shape[1], query.shape[2], key.shape[1]
        groups = heads // kv_heads
        visible = self.visible(module, key, length, mask, kwargs.get("sliding_window"))
        keys, values = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        logits = query @ keys.transpose(-1, -2) * scaling
        cap = kwargs.get("softcap")
        if cap:
            logits = cap * torch.tanh(logits / cap)
        if module.layer_idx in self.weights:
            logits[..., : self.prompt] += self.weights[module.layer_idx].repeat_interleave(groups, dim=1)[:, :, None]
        logits = logits.masked_fill(~visible.repeat_interleave(groups, dim=1), -math.inf)
        sinks = kwargs.get("s_aux")
        if sinks is not None:
            extra = sinks.view(1, -1, 1, 1).expand(len(query), -1, length, 1)
            weights = torch.softmax(torch.cat([logits, extra], dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)
        return (weights @ values).transpose(1, 2).contiguous(), None

    def visible(self, module: Any, key: Tensor, length: int, mask: Tensor | None, window: int | None) -> Tensor:
        """Return the stored columns that each of the newest `length` tokens reads, bool `[B, H, length, T]`."""
        batch, kv_heads, stored, _ = key.shape
        visible = torch.ones(batch, kv_heads, length, stored, dtype=torch.bool)
        at = torch.arange(stored - length, stored)[:, None]
        columns = torch.arange(stored)[None]
        if window:
            visible &= at - columns < window
        elif getattr(module, "is_sliding", False) is False:
            for row in range(batch):
                for head in range(kv_heads):
                    shown = torch.zeros(self.prompt, dtype=torch.bool)
                    kept = self.kept[module.layer_idx][row][head]
                    shown[kept[kept < self.prompt]] = True
                    visible[row, head, :, : self.prompt] &= shown
        visible &= columns <= at
        if mask is not None:
            visible &= mask[:, None, None, -stored:].bool()
        return visible

    def logits(self, ids: Tensor, cache: DynamicCache, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        """Return logits of new tokens on an ordinary cache."""
        AttentionInterface.register(NAME, self.attention)
        AttentionMaskInterface.register(NAME, lambda *args, attention_mask=None, **kwargs: attention_mask)
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(NAME)
        try:
            logits: Tensor = self.model(ids, attention_mask=mask, **with_cache(cache), position_ids=positions).logits
            return logits
        finally:
            self.model.set_attn_implementation(before)


def weights_of(cache: DynamicCache, columns: int) -> dict[int, Tensor]:
    """Return log-weights of the first columns, `[B, H, columns]`, by layer, for layers whose pairs have any."""
    by_layer = {}
    for index, layer in enumerate(cache.layers):
        dense = layer.store.dense if hasattr(layer, "store") else None
        if dense is not None and dense.log_weight is not None:
            by_layer[index] = torch.zeros(dense.layout.streams, columns)
            by_layer[index][dense.layout.stream_of_row, dense.slots().long()] = dense.log_weight.float()
            by_layer[index] = by_layer[index].unflatten(0, (layer.store.batch, -1))
    return by_layer


def decode_both(model: Any, press: Any, ids: Tensor, mask: Tensor | None, steps: int = 6) -> tuple[Tensor, Tensor, Any]:
    """Decode `steps` fixed tokens on the evicted cache and on the oracle; return both logits and the evicted cache.

    The oracle of each step hides the pairs that were evicted before that step.
    """
    stock, cache = DynamicCache(config=model.config), DynamicCache(config=model.config)
    positions = position_ids(mask)
    model(ids, attention_mask=mask, **with_cache(stock), position_ids=positions)
    follow = torch.randint(3, 90, (ids.shape[0], steps), generator=torch.Generator().manual_seed(5))
    outputs, oracles = [], []
    with press(model):
        model(ids, attention_mask=mask, **with_cache(cache), position_ids=positions)
        for step in range(steps):
            columns, grown = ids.shape[1] + step, grow(mask, step + 1)
            oracles.append(Oracle(model, kvpress.kept_positions(cache), columns, weights_of(cache, columns)))
            new, at = follow[:, step : step + 1], position_ids(grown, 1)
            outputs.append(model(new, attention_mask=grown, **with_cache(cache), position_ids=at).logits)
    expected = []
    for step, oracle in enumerate(oracles):
        grown = grow(mask, step + 1)
        expected.append(oracle.logits(follow[:, step : step + 1], stock, grown, position_ids(grown, 1)))
    return torch.cat(outputs, dim=1), torch.cat(expected, dim=1), cache
