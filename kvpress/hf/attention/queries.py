# SPDX-License-Identifier: Apache-2.0
"""Queries of an attention module, from a call of its forward that ends before the attention."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvpress.hf.attention.functions import register
from kvpress.hf.attention.native import NAME
from kvpress.hf.models import CACHE
from kvpress.hf.session.requests import InterceptedError, here
from kvpress.observe.call import LayerCall, rotary_parts

_ROTATES: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def rotates(module: nn.Module, call: LayerCall) -> bool:
    """Whether a layer applies the rotary embedding to its queries; tested once, with its first token.

    Some models skip the rotary embedding in single layers, and have no common flag for it.
    """
    embedding: Any = call.kwargs.get("position_embeddings")
    if rotary_parts(embedding) is None:
        return False
    if module not in _ROTATES:
        first = (
            embedding[:, :1] if isinstance(embedding, Tensor) else tuple(component[:, :1] for component in embedding)
        )
        shifted = first + 1 if isinstance(first, Tensor) else tuple(component + 1 for component in first)
        with torch.no_grad():
            queries = [
                intercept(module, call.hidden_states[:, :1], call.kwargs | {"position_embeddings": e}).queries
                for e in (first, shifted)
            ]
        _ROTATES[module] = not torch.equal(*queries)
    return _ROTATES[module]


def intercept(module: nn.Module, hidden_states: Tensor, kwargs: dict[str, Any]) -> InterceptedError:
    """Return queries `[B, Hq, Q, D]`, keys `[B, H, Q, D]`, logits and sinks of an attention module.

    `hidden_states [B, Q, hidden]` and `kwargs` are the arguments of its forward.
    """
    register()
    # Copy dictionaries, in which layers of some models pass tensors to later layers.
    arguments = {name: dict(value) if isinstance(value, dict) else value for name, value in kwargs.items()}
    arguments = {name: None if isinstance(value, Cache) else value for name, value in arguments.items()}
    arguments.pop("past_key_values", None)
    arguments |= {"hidden_states": hidden_states, "attention_mask": None, CACHE: None}
    config: Any = module.config
    before, native, here.intercepted = here.intercepted, config._attn_implementation, module
    if native != NAME:
        config._attn_implementation_internal = NAME
    try:
        with nullcontext() if here.forward is None else here.forward.with_autocast(True):
            module.forward(**arguments)
    except InterceptedError as inputs:
        return inputs
    finally:
        here.intercepted = before
        if native != NAME:
            config._attn_implementation_internal = native
    raise NotImplementedError(f"{type(module).__name__} did not call its attention function")
