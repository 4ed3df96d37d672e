# SPDX-License-Identifier: Apache-2.0
"""Build a view of plain tensors, for direct calls of `score`, `compress` and helpers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from kvpress.cache.attention import Logits
from kvpress.cache.store import KVStore
from kvpress.hf.attention.queries import intercept
from kvpress.hf.models import find_rotary, find_rotate
from kvpress.observe.call import AttentionLayer, LayerCall, NewTokens
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View, view_groups

NO_ANGLES = (
    "this press needs rotary angles: give the attention module with its `rotary_emb`, or position_embeddings of all tokens in "
    "kwargs, or use it inside `with press(model)`"
)


def view_of_tensors(
    wants: Sequence[Wanted],
    module: nn.Module | None,
    hidden_states: Tensor | None,
    keys: Tensor | None,
    values: Tensor | None,
    kwargs: dict[str, Any],
) -> View:
    """Return a view of all pairs `keys [B, H, n, D]`, as after a prompt.

    The observers `wants` run if there is a module with its input `hidden_states [B, q, hidden]` of the newest q tokens and
    their `position_embeddings`, or a `rotary_emb` that computes them. Without keys, the module computes them.
    """
    module = module if isinstance(module, nn.Module) else None
    if module is not None and hidden_states is not None:
        kwargs = _with_embeddings(module, hidden_states, keys, kwargs)
        if keys is None and "position_embeddings" in signature(module.forward).parameters.keys() - kwargs.keys():
            raise ValueError(NO_ANGLES)
        inputs = intercept(module, hidden_states, kwargs) if keys is None else None
        keys, values = (inputs.keys, inputs.keys) if inputs is not None else (keys, values)
    if keys is None or values is None:
        raise ValueError("give an attention module with its hidden_states, or keys and values")
    store = KVStore(keys, values)
    store.append(keys, values)
    hidden = keys.new_empty(keys.shape[0], 0, 1) if hidden_states is None else hidden_states
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", 0)
    layers = getattr(config, "num_hidden_layers", layer + 1)
    call = LayerCall(
        AttentionLayer(
            module=nn.Module() if module is None else module,
            index=layer,
            count=layers,
            depth=layer,
            depths=layers,
            apply_rotary=None if module is None else find_rotate(module),
        ),
        NewTokens(
            seen_before=store.seen - hidden.shape[1],
            rules={rule.key: rule for observation in wants for rule in observation.rules},
        ),
        store=store,
        kwargs=kwargs,
        hidden_states=hidden,
        queries=keys.new_empty(*keys.shape[:2], 0, keys.shape[3]),
        logits=Logits(keys.shape[3] ** -0.5),
        by_hand=True,
    )
    call.layer.rotary_angles = _angles(call)
    if wants and hidden.shape[1] and "position_embeddings" in kwargs:
        inputs = intercept(call.layer.module, hidden, kwargs)
        call.queries, call.logits, call.sinks = inputs.queries, inputs.logits, inputs.sinks
        for observation in wants:
            store.observers[observation] = observation.make()
            store.observers[observation].observe(call)
    (view,) = (view for group in view_groups(call) for view in group)
    return view


def _with_embeddings(module: nn.Module, hidden: Tensor, keys: Tensor | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of an attention module, with position embeddings if its `rotary_emb` can compute them."""
    embedding = None if "position_embeddings" in kwargs else find_rotary(module, module)
    if embedding is None:
        return kwargs
    end = hidden.shape[1] if keys is None else keys.shape[2]
    positions = torch.arange(end - hidden.shape[1], end, device=hidden.device)[None]
    return {**kwargs, "position_embeddings": embedding(hidden, positions)}


def _angles(call: LayerCall) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the rotary angles of the layer, from the embedding of its module or from `position_embeddings`."""
    embedding = find_rotary(call.layer.module, call.layer.module)
    if embedding is not None:
        return embedding

    def angles_at(like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        del like
        embeddings = call.kwargs.get("position_embeddings")
        indices = positions - call.tokens.seen_before
        if embeddings is None or bool((indices < 0).any()) or bool((indices >= embeddings[0].shape[1]).any()):
            raise ValueError(NO_ANGLES)
        cos, sin = (
            table.expand(len(indices), -1, -1).gather(1, indices[..., None].expand(-1, -1, table.shape[2]))
            for table in embeddings
        )
        return cos, sin

    return angles_at
