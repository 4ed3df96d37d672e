# SPDX-License-Identifier: Apache-2.0
"""Passes of a causal language model without its causal mask: every token sees all others."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from kvpress.core.model import ModelFacts
from kvpress.hf.attention.attention_override import check_free
from kvpress.hf.attention.functions import native_name
from kvpress.hf.models import attention_modules, decoder_of, facts_of, layer_types, uses_interface

MASKED = ("sdpa", "eager")
"""Attention implementations that read a mask of numbers, whatever is_causal says."""
READING = ("full_attention", "sliding_attention", "chunked_attention")


def check_bidirectional(model: Any, tokens: int) -> ModelFacts:
    """Return the facts of a model whose causal mask can be removed, for sequences of so many tokens.

    Raises:
        NotImplementedError: it cannot be removed; says why.
        ValueError: the sequence is longer than a sliding window of the model.
        RuntimeError: its attention is replaced by something else.
    """
    check_free(model)
    name, why = type(model).__name__, None
    if getattr(model.config, "is_encoder_decoder", False):
        raise NotImplementedError(
            f"{name} is an encoder-decoder model; masked diffusion needs a decoder that reads alone"
        )
    modules = attention_modules(model)
    kinds = layer_types(model.config.get_text_config(decoder=True))
    other = sorted(set(kinds) - set(READING))
    if other:
        why = f"has {', '.join(other)} layers, which read from left to right by a state of their own, without a mask"
    elif len(modules) != len(kinds):
        why = f"has {len(kinds)} layers, but {len(modules)} attention modules that know their layer were found"
    elif not all(uses_interface(module) for module in modules):
        why = (
            "masks its attention by itself instead of calling the attention interface of transformers, as remote code often "
            "does; use a port of it that does"
        )
    elif "position_ids" not in inspect.signature(decoder_of(model).forward).parameters:
        why = "takes no position_ids, so a block cannot be read in its place"
    elif native_name(model.config) not in MASKED:
        found = native_name(model.config)
        why = f"attends by {found!r}, which takes no mask of numbers: call model.set_attn_implementation('sdpa')"
    if why is not None:
        raise NotImplementedError(f"the causal mask of {name} cannot be removed: it {why}")
    facts = facts_of(model)
    if facts.window and set(kinds) - {"full_attention"} and tokens > facts.window:
        raise ValueError(
            f"{name} has layers with a window of {facts.window} tokens before each one, which says nothing of tokens behind "
            f"it; prompt and new tokens are {tokens}: keep them within {facts.window}"
        )
    return facts


def read_both_ways(model: Any, ids: Tensor, real: Tensor, positions: Tensor, wanted: slice) -> Tensor:
    """Return the logits `[B, m, V]` of the `wanted` ones of some tokens `ids [B, n]` at `positions [B, n]`.

    `real [B, T]` marks the tokens that they see: themselves, or more where something takes the place of the attention.
    """
    hidden = torch.zeros(len(ids), 1, 1, real.shape[1], dtype=model.dtype, device=ids.device)
    # A mask of four dimensions is handed on as it is, in the place of the causal one.
    hidden = hidden.masked_fill_(~real[:, None, None], torch.finfo(model.dtype).min)
    extra: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        extra["logits_to_keep"] = torch.arange(*wanted.indices(ids.shape[1]), device=ids.device)
    logits: Tensor = model(
        input_ids=ids, attention_mask=hidden, position_ids=positions, use_cache=False, **extra
    ).logits
    return logits if extra else logits[:, wanted]
