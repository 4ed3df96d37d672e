# SPDX-License-Identifier: Apache-2.0
"""Queries and keys of the tiny models from their own projections, independent of observers."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

HEADS, KV_HEADS = 4, 2


def attention_of(model: Any, ids: Tensor, layer: int) -> dict[str, Any]:
    """Return the keyword arguments of an attention module."""
    caught: dict[str, Any] = {}
    module = model.get_decoder().layers[layer].self_attn
    hook = module.register_forward_pre_hook(lambda m, args, kwargs: caught.update(kwargs), with_kwargs=True)
    with torch.no_grad():
        model(ids)
    hook.remove()
    return caught


def projected(model: Any, ids: Tensor, layer: int) -> dict[str, Tensor]:
    """Return queries and keys of a layer, `[S, heads, T, D]`, from its own projections, before and after rotation."""
    module = model.get_decoder().layers[layer].self_attn
    caught = attention_of(model, ids, layer)
    hidden = caught["hidden_states"]
    if hasattr(module, "qkv_proj"):
        size = module.head_dim
        q, k, _ = module.qkv_proj(hidden).split([HEADS * size, KV_HEADS * size, KV_HEADS * size], dim=-1)
    else:
        q, k = module.q_proj(hidden), module.k_proj(hidden)
    q, k = q.unflatten(-1, (HEADS, -1)), k.unflatten(-1, (KV_HEADS, -1))
    if hasattr(module, "q_norm"):
        q, k = module.q_norm(q), module.k_norm(k)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    turn = sys.modules[type(module).__module__].apply_rotary_pos_emb
    turned = turn(q, k, *caught["position_embeddings"])
    return {"q": q, "k": k, "turned_q": turned[0], "turned_k": turned[1]}
