# SPDX-License-Identifier: Apache-2.0
"""Attention function that replaces that of a model under a press."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from kvpress import kernels
from kvpress.cache.attention import Logits, Partial, ungroup
from kvpress.cache.readout import dense_pairs, why_unreadable
from kvpress.cache.streams import StreamPairs
from kvpress.cache.window import RealTokens
from kvpress.hf.attention.differentiable import attend_with_graph
from kvpress.hf.attention.masks import PressMask, mask
from kvpress.hf.attention.native import NAME, native_attention, native_name
from kvpress.hf.session.requests import Forward, InterceptedError, here
from kvpress.observe.call import LayerCall

KNOWN_ATTENTION_ARGUMENTS = frozenset({"softcap", "s_aux", "position_ids"})
"""Supported tensor and float arguments of a model's attention, besides scaling."""

FEW, MANY = 16, 1024
"""Most new tokens, and fewest tokens before them, for which the store replaces sdpa with grouped heads on a CPU."""


def register() -> None:
    """Register both functions in transformers as `kvpress`."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PressMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend to the pairs of the cache: `query [B, Hq, Q, D]`, new `key` and `value [B, H, Q, D]`. Registered as `kvpress`."""
    forward = here.forward
    if here.intercepted is module:
        plan = None if forward is None else forward.session.layers.get(id(module))
        query = _in_order(query, key, None if plan is None else plan.tiles)
        raise InterceptedError(query, key, logits_of(query, scaling, kwargs), kwargs.get("s_aux"))
    call = None if forward is None else forward.call
    lent_call = None if forward is None or call is not None else forward.lent_call(key)
    call = (
        call
        if lent_call is None
        else replace(lent_call, layer=replace(lent_call.layer, module=module), tokens=replace(lent_call.tokens))
    )
    native = attention_mask.native if isinstance(attention_mask, PressMask) else lambda keys: attention_mask
    if forward is None or call is None or call.layer.module is not module or call.store is None:
        run = native_attention(module)
        return run(module, query, key, value, native(key.shape[2]), scaling=scaling, dropout=dropout, **kwargs)
    if attention_mask is not None and not isinstance(attention_mask, PressMask):
        raise NotImplementedError("4-D attention masks are not supported; pass the 2-D mask of real tokens")
    check_known(module, kwargs)

    store, length = call.store, query.shape[2]
    session, static, rereads = forward.session, forward.static, forward.watch is not None or lent_call is not None
    plan = session.layers[id(lent_call.layer.module if lent_call else module)]
    is_first, native_query = call.tokens.seen_before == 0, query
    if plan.tiles is None:
        plan.tiles = _tiles(module, call, key, value)
    query = _in_order(query, key, plan.tiles)
    call.queries = query
    call.logits = logits_of(query, scaling, kwargs)
    call.sinks, call.causal = kwargs.get("s_aux"), _is_causal(attention_mask)
    if static is not None:
        real = static.real_tokens
    else:
        real = None if attention_mask is None else attention_mask.real(call, forward.request)
    call.tokens.mask = None if real is None else real.real
    # torch's CPU sdpa is slow for a single query over grouped heads, so the store always computes these.
    reads_store = (
        store.has_sealed
        or (length == 1 and call.tokens.seen_before > 0 and (static is not None or query.is_cpu))
        or _few_behind_many(module, call, attention_mask)
    )
    pattern = plan.pattern if call.phase == "prefill" and length > 1 and not rereads else None
    if pattern is not None and attention_mask is not None and attention_mask.sees_later():
        raise NotImplementedError(
            f"in {type(module).__name__}, tokens of an image attend to later ones, but sparse prefill is "
            "causal: leave out the pattern (`reach` of video_xl2)"
        )
    if forward.differentiable:
        keys, values = store.window.filled_keys.detach(), store.window.filled_values.detach()
        if store.sealed:
            result = attend_with_graph(call, query, *call.written)  # type: ignore[misc]
            result = _out_of_order(result.to(query.dtype), key, plan.tiles)
        else:
            stored = _arranged(keys, values, key, plan.tiles)
            keys, values = (torch.cat(pair, dim=2) for pair in zip(stored, (key, value), strict=True))
            visible = native(keys.shape[2])
            run = native_attention(module)
            result, _ = run(module, native_query, keys, values, visible, scaling=scaling, dropout=dropout, **kwargs)
    elif forward.parts or (forward.nearby is not None and call.layer.expand is None and call.causal):
        with forward.with_autocast(False):
            out, call.lse = _attend_parts(call, query, real, forward)
        result = _out_of_order(ungroup(out, query.shape[0], query.shape[1]).to(query.dtype), key, plan.tiles)
    elif reads_store or pattern is not None:
        reader = None if rereads or not reads_store else plan.reader(call)
        pattern_attention = None if pattern is None else partial(pattern.attend, call)
        with forward.with_autocast(False):
            out, call.lse = store.attend(query, call.logits, real, call.sinks, reader, pattern_attention)
        result = _out_of_order(ungroup(out, query.shape[0], query.shape[1]).to(query.dtype), key, plan.tiles)
    else:
        keys, values = store.window.filled_keys, store.window.filled_values
        keys, values = (key, value) if is_first else _arranged(keys, values, key, plan.tiles)
        run = native_attention(module)
        result, call.attentions = run(
            module, native_query, keys, values, native(keys.shape[2]), scaling=scaling, dropout=dropout, **kwargs
        )
    with forward.with_autocast(False):
        if plan.selector is not None and not rereads:
            plan.selector.after(call)
        if static is None and not rereads:
            session.observe(call)
    if forward.weights and not rereads and call.attentions is None:
        settings = {"scaling": scaling, "dropout": dropout, **kwargs}
        return result, _weights(module, call, native_query, key, plan.tiles, attention_mask, settings)
    return result, call.attentions


def _attend_parts(call: LayerCall, query: Tensor, real: RealTokens | None, forward: Forward) -> Partial:
    """Attend from every text of a pass, `query [B, Hq, Q, D]`, to stored pairs and to itself; see `Pass.read`."""
    parts = max(1, forward.parts)
    if forward.nearby is not None:
        return forward.nearby(call).attend(query, call.logits, call.sinks, parts)
    assert call.written is not None  # noqa: S101 - for type checkers
    keys, values = call.written
    own = StreamPairs.of_pass(keys, values, parts).attend(query, call.logits, None, parts)
    return kernels.merge([own, call.store.attend(query, call.logits, real, call.sinks, causal=False)])


def _weights(
    module: nn.Module, call: LayerCall, query: Tensor, key: Tensor, tiles: int, mask: PressMask | None, settings: Any
) -> Tensor | None:
    """Return the weights `[B, Hq, Q, stored]` of new tokens over the pairs of a layer, from the model's eager attention.

    Attention functions that compute no weights give None.

    Raises:
        ValueError: the heads of the layer store different numbers of pairs, or pairs are encoded.
    """
    store = call.store
    reason = why_unreadable([store])
    if reason:
        raise ValueError(
            f"output_attentions=True cannot return the attention weights of layer {call.layer.index}: {reason}"
        )
    keys, values = _arranged(*dense_pairs(store), key, tiles)
    visible: Any = None if mask is None else mask.native(keys.shape[2])
    if store.sealed:
        # All rows hold the same number of pairs, so the mask is causal among the new tokens and open elsewhere.
        length = query.shape[2]
        future = torch.ones(length, keys.shape[2], dtype=torch.bool, device=query.device).triu(
            keys.shape[2] - length + 1
        )
        visible = torch.zeros(future.shape, dtype=query.dtype, device=query.device)
        visible = visible.masked_fill(future, torch.finfo(query.dtype).min)[None, None]
    _, weights = native_attention(module)(module, query, keys, values, visible, **settings)
    return weights


def _few_behind_many(module: nn.Module, call: LayerCall, mask: PressMask | None) -> bool:
    """Whether few tokens read a long cache on a CPU, where torch's sdpa copies all pairs for every query head.

    Passes that verify drafts do so. Returns False for masks that are not plainly causal, since the store has no other mask.
    """
    queries = call.queries
    return (
        queries is not None
        and call.store is not None
        and queries.device.type == "cpu"
        and 1 < queries.shape[2] <= FEW
        and call.tokens.seen_before >= MANY
        and queries.shape[1] > call.store.heads
        and _is_causal(mask)
        and native_name(module.config) == "sdpa"
    )


def _is_causal(mask: PressMask | None) -> bool:
    """Whether a mask is known, and hides padding and later tokens only."""
    return mask is not None and mask.arguments.get("mask_function", causal_mask_function) is causal_mask_function


def check_known(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse tensor and float arguments of a module's attention that this attention would ignore."""
    unknown = [n for n, v in kwargs.items() if isinstance(v, (Tensor, float)) and n not in KNOWN_ATTENTION_ARGUMENTS]
    if unknown:
        raise NotImplementedError(
            f"{type(module).__name__} passes {unknown} to its attention, which compressed attention does not support"
        )


def logits_of(query: Tensor, scaling: float | None, kwargs: dict[str, Any]) -> Logits:
    """Return the scale and soft cap of a model's logits, from the arguments of its attention."""
    return Logits(query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs.get("softcap"))


def _tiles(module: nn.Module, call: LayerCall, key: Tensor, value: Tensor) -> int:
    """Return how many times the sequence of KV heads is repeated in `key`; 1 if heads are as written or interleaved.

    Raises:
        NotImplementedError: `key` or `value` has other numbers than those written to the cache.
    """
    assert call.written is not None  # noqa: S101 - for type checkers
    passed_pairs, written = (key, value), call.written
    times = key.shape[1] // written[0].shape[1]

    def matches(arranged: Callable[[Tensor], Tensor]) -> bool:
        pairs = [(new, arranged(old)) for new, old in zip(passed_pairs, written, strict=True)]
        return all(new is old or (new.shape == old.shape and torch.equal(new, old.to(new))) for new, old in pairs)

    if matches(lambda old: old) or matches(lambda old: old.repeat_interleave(times, dim=1)):
        return 1
    if matches(lambda old: old.repeat(1, times, 1, 1)):
        return times
    raise NotImplementedError(
        f"{type(module).__name__} passes its attention other keys or values than those in its cache, which compressed "
        "attention cannot read"
    )


def _in_order(query: Tensor, key: Tensor, tiles: int | None) -> Tensor:
    """Reorder query heads so that each GQA group is contiguous, as the store expects."""
    if tiles in (None, 1):
        return query
    per_tile: Tensor = query.unflatten(1, (tiles, key.shape[1] // tiles, -1))
    return per_tile.transpose(1, 2).flatten(1, 3)


def _out_of_order(output: Tensor, key: Tensor, tiles: int) -> Tensor:
    """Undo `_in_order` for an output `[B, Q, Hq, Dv]`."""
    if tiles == 1:
        return output
    per_tile: Tensor = output.unflatten(2, (key.shape[1] // tiles, tiles, -1))
    return per_tile.transpose(2, 3).flatten(2, 4)


def _arranged(keys: Tensor, values: Tensor, key: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """Return stored keys and values with their heads repeated in the order of `key`, an argument of the attention."""
    times = key.shape[1] // keys.shape[1]
    if times == 1:
        return keys, values
    if tiles == 1:
        return keys.repeat_interleave(times, dim=1), values.repeat_interleave(times, dim=1)
    return keys.repeat(1, times, 1, 1), values.repeat(1, times, 1, 1)
