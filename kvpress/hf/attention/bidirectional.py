# SPDX-License-Identifier: Apache-2.0
"""Bidirectional passes of a causal language model: every token attends to all others."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from kvpress.core.model import ModelFacts
from kvpress.hf.attention.attention_override import check_free
from kvpress.hf.attention.native import native_name
from kvpress.hf.config import layer_types
from kvpress.hf.models import attention_modules, decoder_of, facts_of, uses_interface

MASKED = ("sdpa", "eager")
"""Attention implementations that apply a float mask regardless of is_causal."""
READING = ("full_attention", "sliding_attention", "chunked_attention")


def check_bidirectional(model: Any, tokens: int) -> ModelFacts:
    """Return the facts of a model, after checks that its causal mask can be removed for sequences of `tokens` tokens.

    Raises:
        NotImplementedError: the causal mask cannot be removed; the message has the reason.
        ValueError: the sequence is longer than a sliding window of the model.
        RuntimeError: the attention of the model is replaced already.
    """
    check_free(model)
    name, why = type(model).__name__, None
    if getattr(model.config, "is_encoder_decoder", False):
        raise NotImplementedError(
            f"{name} is an encoder-decoder model; masked diffusion needs a decoder that reads alone"
        )
    modules = attention_modules(model)
    kinds = layer_types(model.config.get_text_config(decoder=True))
    unsupported = sorted(set(kinds) - set(READING))
    if unsupported:
        why = f"has {', '.join(unsupported)} layers, which carry a state from left to right, without a mask"
    elif len(modules) != len(kinds):
        why = f"has {len(kinds)} layers, but {len(modules)} attention modules with a layer index were found"
    elif not all(uses_interface(module) for module in modules):
        why = (
            "masks its attention by itself instead of calling the attention interface of transformers, as remote code often "
            "does; use a port that calls the interface"
        )
    elif "position_ids" not in inspect.signature(decoder_of(model).forward).parameters:
        why = "takes no position_ids, so a block cannot be read in its place"
    elif native_name(model.config) not in MASKED:
        implementation = native_name(model.config)
        why = (
            f"uses {implementation!r} attention, which takes no float mask: call model.set_attn_implementation('sdpa')"
        )
    if why is not None:
        raise NotImplementedError(f"the causal mask of {name} cannot be removed: it {why}")
    facts = facts_of(model)
    if facts.window and set(kinds) - {"full_attention"} and tokens > facts.window:
        raise ValueError(
            f"{name} has layers with a causal window of {facts.window} tokens, which does not apply to later tokens; "
            f"prompt and new tokens are {tokens}: keep them within {facts.window}"
        )
    return facts


def read_both_ways(model: Any, ids: Tensor, real: Tensor, positions: Tensor, wanted: slice) -> Tensor:
    """Return the logits `[B, m, V]` of the `wanted` slice of tokens `ids [B, n]` at `positions [B, n]`.

    `real [B, T]` marks the tokens that they attend to: themselves, or also earlier ones if the attention is replaced.
    """
    hidden_mask = torch.zeros(len(ids), 1, 1, real.shape[1], dtype=model.dtype, device=ids.device)
    # transformers passes a 4-D mask on unchanged, instead of a causal one.
    hidden_mask = hidden_mask.masked_fill_(~real[:, None, None], torch.finfo(model.dtype).min)
    extra: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        extra["logits_to_keep"] = torch.arange(*wanted.indices(ids.shape[1]), device=ids.device)
    logits: Tensor = model(
        input_ids=ids, attention_mask=hidden_mask, position_ids=positions, use_cache=False, **extra
    ).logits
    return logits if extra else logits[:, wanted]
