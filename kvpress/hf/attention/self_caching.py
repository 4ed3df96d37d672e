# SPDX-License-Identifier: Apache-2.0
"""Support models whose attention reads all columns: no attention interface, latents, a position bias, or mixed heads.

Such a module reads all keys and values of its cache layer, and expects each pair in its column, which is its slot in the
sequence: masks, ALiBi and relative positions depend on it. Only kept pairs are stored. During one layer, they are scattered to
all columns; an evicted pair has a key of NaN and a value of zero. NaN propagates through any change of the logits, in each
head, and becomes a weight of zero in the softmax or in torch's `scaled_dot_product_attention`. This frees memory, but makes
reading slower, not faster.

Multi-head latent attention (MLA) caches latents `[B, 1, n, rank]` instead of keys, which its modules expand to keys and values
of all heads, and the rotary part of the keys `[B, 1, n, d]` instead of values. There, the rotary part of evicted pairs is NaN.

Modules that mix the values of heads (`kvpress.hf.head_mixing`) need the pair of a token in all heads or in none. Their heads
are stored side by side as one, so that they share one choice of pairs. The attention mask hides evicted pairs too, because such
a module may compute a mask of its own from it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kvpress.cache.readout import evicted_columns, merge_heads
from kvpress.cache.store import KVStore
from kvpress.core.recipe import Recipe
from kvpress.hf.models import attention_modules, mixes_heads, uses_interface
from kvpress.hf.session.requests import Forward, here
from kvpress.observe.call import LayerCall
from kvpress.observe.hidden import HiddenStates
from kvpress.observe.spans import SpanTracker

READABLE = ("eager", "sdpa")
"""Attention implementations in which an evicted pair can be masked."""
SOFTMAX = (functional.softmax, torch.softmax, Tensor.softmax)


def caches_latents(module: nn.Module) -> bool:
    """Whether an attention module caches latents and expands them at each read."""
    return hasattr(module, "expand_kv")


def adds_position_bias(module: nn.Module) -> bool:
    """Whether an attention module adds a bias `[B, Hq, Q, columns]` to its logits, which depends on distances of tokens."""
    return _module_adds_bias(type(module).__module__)


@functools.cache
def _module_adds_bias(name: str) -> bool:
    eager = getattr(sys.modules[name], "eager_attention_forward", None)
    return eager is not None and "position_bias" in inspect.signature(eager).parameters


def reads_itself(module: nn.Module) -> bool:
    """Whether an attention module needs all pairs of its cache layer, each in its column."""
    return caches_latents(module) or not uses_interface(module) or adds_position_bias(module) or mixes_heads(module)


def expanded(module: nn.Module) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Return a function that expands latents to keys and values for scorers, with all heads concatenated in one pair.

    It maps `latents [b, 1, n, rank]` and rotary parts `[b, 1, n, d]` to `[b, 1, n, Hq * D]` and `[b, 1, n, Hq * Dv]`. Returns
    None for modules that cache keys and values.
    """
    if not caches_latents(module):
        return None
    expand: Any = module.expand_kv

    @torch.no_grad()
    def side_by_side(latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = expand(latents, rotary)
        return merge_heads(keys), merge_heads(values)

    return side_by_side


def check_press(model: Any, recipe: Recipe) -> None:
    """Refuse presses that need more than the stored pairs of a model that reads its cache by itself.

    Raises:
        NotImplementedError: the press needs more; the message names it.
    """
    evictions = recipe.evictions
    supported = (HiddenStates, SpanTracker)  # observers of inputs, which need no attention
    watched = sorted({entry.kind.__name__ for entry in recipe.watched("prefill") if entry.kind not in supported})
    needs = {
        "to read stored pairs in its own way (a selector or pattern)": recipe.selector or recipe.pattern,
        "to move or change pairs": [step for step in evictions if step.rewrites],
        "to change the cache in a `compress` or `forward_hook`": [
            step for step in evictions if step.compress or step.hook
        ],
        "to act on whole passes": recipe.hooks or [step for step in evictions if step.prepare is not None],
        f"to observe the attention ({', '.join(watched)})": watched,
    }
    for need, is_needed in needs.items():
        if is_needed:
            raise NotImplementedError(
                f"{type(model).__name__} reads its cache by itself ({_how(model)}), so a press can only score pairs by their "
                f"keys and values and store them; this one needs {need}; use a press such as knorm, keydiff, streaming_llm, "
                "random or kivi"
            )
    implementation = model.config._attn_implementation
    if implementation not in READABLE and not recipe.is_identity:
        raise NotImplementedError(
            f"{type(model).__name__} reads its cache by itself, and evicted pairs cannot be masked in {implementation!r}; call "
            "model.set_attn_implementation('sdpa') or 'eager' before the block"
        )


def _how(model: nn.Module) -> str:
    if any(caches_latents(module) for module in model.modules()):
        return "multi-head latent attention, MLA"
    if any(mixes_heads(module) for module in attention_modules(model)):
        return "its attention mixes the cached values of heads, so all heads share one choice of pairs"
    if all(uses_interface(module) for module in attention_modules(model)):
        return "a position bias has an entry for each column"
    return "it does not call the attention interface of transformers"


def attend(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run the `forward` of an attention module that reads its cache by itself, with zero weight on evicted pairs.

    Raises:
        NotImplementedError: the module computes its weights without a softmax of torch.
    """
    call = None if here.forward is None else here.forward.call
    if call is None or call.store is None or not call.store.sealed:
        return forward(*args, **kwargs)
    if call.layer.merged_heads > 1:
        kwargs["attention_mask"] = _mask_without_evicted(kwargs.get("attention_mask"), call.store, call.hidden_states)
    with HidingEvicted() as hiding:
        output = forward(*args, **kwargs)
    if not hiding.acted:
        raise NotImplementedError(
            f"{type(call.layer.module).__name__} computes attention weights without a softmax of torch, so evicted pairs "
            "cannot be masked"
        )
    return output


def note(forward: Forward, call: LayerCall) -> None:
    """Record the pairs that such a module has written, after its forward, and run the observers."""
    if call.written is None:
        raise NotImplementedError(f"{type(call.layer.module).__name__} did not write its layer of the cache")
    keys, _ = call.written
    call.count(keys.shape[2])
    call.queries = keys.new_empty(*keys.shape[:3], 0)
    call.hidden_states = call.hidden_states[:, : keys.shape[2]]  # ProphetNet appends predictions to the tokens
    if forward.watch is None:
        forward.session.observe(call)


def _mask_without_evicted(mask: Tensor | None, store: KVStore, hidden_states: Tensor) -> Tensor:
    """Return the mask `[B, 1, Q, columns]` of new `hidden_states [B, Q, hidden]` that hides evicted pairs too.

    None, for a mask that only hides later tokens, becomes a mask that is added to logits.
    """
    new = hidden_states.shape[1]
    evicted = functional.pad(evicted_columns(store), (0, new))[:, :, None]
    if mask is None:
        is_later = torch.ones(new, evicted.shape[-1], dtype=torch.bool, device=evicted.device).triu(store.seen + 1)
        mask, evicted = hidden_states.new_zeros(1, 1, 1, 1), evicted | is_later
    return mask & ~evicted if mask.dtype == torch.bool else mask.masked_fill(evicted, torch.finfo(mask.dtype).min)


class HidingEvicted(TorchFunctionMode):
    """Mode in which NaN logits, those of evicted pairs, get zero weight."""

    acted = False
    """Whether any attention weights were computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in SOFTMAX:
            self.acted = True
            logits = args[0] if args else kwargs.pop("input")
            return func(logits.masked_fill(logits.isnan(), float("-inf")), *args[1:], **kwargs)
        if func is functional.scaled_dot_product_attention:
            self.acted = True
            return _attention_without_evicted(*args, **kwargs)
        return func(*args, **kwargs)


def _attention_without_evicted(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Run torch's attention of `query [B, Hq, Q, D]` over `key [B, H, n, D]`, with evicted keys that end in NaN."""
    is_evicted = key[..., -1].isnan()
    key, evicted = key.masked_fill(is_evicted[..., None], 0.0), is_evicted[:, :, None]
    if query.shape[1] > key.shape[1]:
        evicted = evicted.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    if is_causal:
        attn_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if attn_mask is None:
        attn_mask = ~evicted
    elif attn_mask.dtype == torch.bool:
        attn_mask = attn_mask & ~evicted
    else:
        attn_mask = attn_mask.masked_fill(evicted, float("-inf"))
    return functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, **kwargs)
