# SPDX-License-Identifier: Apache-2.0
"""Attention and mask functions that replace those of a model under a press."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpress import kernels
from kvpress.cache.attention import Logits, Partial, ungroup
from kvpress.cache.readout import dense_pairs, why_unreadable
from kvpress.cache.streams import StreamPairs
from kvpress.cache.window import RealTokens
from kvpress.hf.attention.differentiable import attend_with_graph
from kvpress.hf.models import CACHE
from kvpress.hf.session.requests import Forward, Request, generated_behind, here
from kvpress.observe.call import LayerCall, rotary_parts

NAME = "kvpress"
KNOWN_ATTENTION_ARGUMENTS = frozenset({"softcap", "s_aux", "position_ids"})
"""Supported tensor and float arguments of a model's attention, besides scaling."""

FEW, MANY = 16, 1024
"""Most new tokens, and fewest tokens before them, for which the store replaces sdpa with grouped heads on a CPU."""


AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
"""Attention function of transformers: returns the output `[B, Q, Hq, Dv]`, and the weights if it computes them."""


class PressName(str):
    """Name `kvpress` in a configuration. It stores the `native` name, which copies of the configuration get instead."""

    native: str

    def __new__(cls, native: str) -> PressName:
        name = super().__new__(cls, NAME)
        name.native = native
        return name

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.native,)


def native_name(config: PreTrainedConfig) -> str:
    """Return the attention implementation that a configuration has without a press."""
    name: str = config._attn_implementation
    if name == NAME and not isinstance(name, PressName):
        raise RuntimeError(
            f"the attention implementation {NAME!r} works only inside `with press(model):`, which sets it; call "
            "model.set_attn_implementation('sdpa')"
        )
    return getattr(name, "native", name)


def native_attention(module: nn.Module) -> AttentionFunction:
    """Return the attention function that a module uses without a press."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attend: AttentionFunction = ALL_ATTENTION_FUNCTIONS.get_interface(native_name(module.config), eager)
    return attend


def register() -> None:
    """Register both functions in transformers as `kvpress`."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


@dataclass
class PressMask:
    """Result of the mask function: the 2-D mask, and the means to build the mask of the model's own attention.

    Models pass masks on unchanged, so one object serves layers with this module's attention and layers with the model's own.
    """

    mask: Tensor | None
    """Real tokens `[B, tokens]`; None without padding."""
    arguments: dict[str, Any]
    """Arguments of the model's own mask function."""
    build: Callable[..., Any]
    """Mask function of the model's own attention implementation."""
    built: dict[int, Any] = field(default_factory=dict)
    """Native masks by their number of keys."""
    real_tokens: RealTokens | None = None
    """Real tokens of the pass, shared by all layers."""
    stored: tuple[int, int] | None = None
    """Number of keys, and the position of the first, that the cache reported to the mask function."""
    later: bool | None = None
    """Result of `sees_later`, once computed."""
    place: torch.device | None = None
    """Device of the masks; None for that of the arguments."""
    moved: dict[torch.device, PressMask] = field(default_factory=dict)
    """This mask on other devices."""

    @property
    def device(self) -> torch.device:
        """Device of the masks."""
        default = "cpu" if self.mask is None else self.mask.device
        return self.place or torch.device(self.arguments.get("device", default))

    def to(self, device: torch.device | str | int, **settings: Any) -> PressMask:
        """Return the mask on a device, one object for all its layers; accelerate moves all inputs of the layers it placed."""
        device = torch.device(device)
        if device == self.device:
            return self
        if device not in self.moved:

            def build(**arguments: Any) -> Any:
                native = self.build(**arguments)
                return native.to(device, **settings) if isinstance(native, Tensor) else native

            mask = None if self.mask is None else self.mask.to(device, **settings)
            self.moved[device] = PressMask(
                mask, self.arguments, build, stored=self.stored, later=self.sees_later(), place=device
            )
        return self.moved[device]

    def real(self, call: LayerCall, request: Request | None) -> RealTokens | None:
        """Return the real tokens among those seen, one object for all layers; None without padding."""
        if self.real_tokens is None and self.mask is not None:
            seen = self.mask[:, : call.store.seen]
            later = call.phase == "decode"
            real = generated_behind(seen, request, call.cache) if later else RealTokens(seen)
            if real.unpadded:
                self.mask = None
            else:
                self.real_tokens = real
        return self.real_tokens

    def native(self, keys: int) -> Any:
        """Return the mask of the model's own attention over `keys` keys, which are all tokens or those of a window."""
        if keys not in self.built:
            sizes = {}
            if self.stored is not None and keys == self.stored[0]:
                sizes = dict(zip(("kv_length", "kv_offset"), self.stored, strict=True))
            self.built[keys] = self.build(**{**self.arguments, **sizes})
        return self.built[keys]

    def sees_later(self) -> bool:
        """Whether a token of the pass attends to the next one, as tokens of an image do in some models."""
        function = self.arguments.get("mask_function", causal_mask_function)
        if function is causal_mask_function:
            return False
        if self.later is None:
            mask, start = self.mask, int(self.arguments["q_offset"])
            device = self.arguments.get("device", "cpu" if mask is None else mask.device)
            at = torch.arange(start, start + self.arguments["q_length"] - 1, device=device)[None]
            row = torch.arange(self.arguments["batch_size"], device=device)[:, None]
            self.later = bool(torch.as_tensor(function(row, torch.zeros_like(row), at, at + 1)).any())
        return self.later

    def __getitem__(self, index: Any) -> PressMask:
        """Return the mask of some queries, for models whose later layers process only the newest tokens."""
        arguments = {**self.arguments, "allow_is_causal_skip": False}
        return PressMask(
            self.mask, arguments, lambda **settings: self.build(**settings)[index], real_tokens=self.real_tokens,
            place=self.place,
        )  # fmt: skip

    def of_tokens(self, index: Tensor, real: Tensor) -> PressMask:
        """Return the mask of a pass over the tokens at `index [B, m]` of a prompt; `real [B, m]` is False for padding."""
        padding_mask = None if bool(real.all()) else real
        if self.arguments.get("mask_function", causal_mask_function) is causal_mask_function:
            lengths = {"q_length": index.shape[1], "kv_length": index.shape[1]}
            arguments = {**self.arguments, **lengths, "attention_mask": padding_mask}
            return PressMask(padding_mask, arguments, self.build, place=self.place)

        def build(**arguments: Any) -> Tensor:
            full_mask = self.build(**{**arguments, "allow_is_causal_skip": False})
            if not isinstance(full_mask, Tensor) or full_mask.dim() != 4:
                raise NotImplementedError(
                    "this model's masks have no entry for each token; use its sdpa or eager attention"
                )
            rows = torch.arange(len(index), device=index.device)[:, None, None]
            chosen = full_mask.expand(len(index), *full_mask.shape[1:])[rows, 0, index[:, :, None], index[:, None]]
            hidden = ~(real[:, None] | torch.eye(index.shape[1], dtype=torch.bool, device=index.device))
            return chosen.masked_fill(hidden, False if chosen.dtype == torch.bool else torch.finfo(chosen.dtype).min)[
                :, None
            ]

        return PressMask(padding_mask, self.arguments, build, place=self.place)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"this model reads `{name}` of its attention mask, which compressed attention does not support"
        )


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, **kwargs: Any
) -> PressMask:
    """Store the arguments of a mask, which is built when an attention needs it. Registered as `kvpress`."""
    stored = kv_length, kv_offset
    if kwargs.get("local_size") is None:
        # A PressLayer reports its stored pairs, for use without a press. Under a press, native attention reads all tokens.
        kv_length, kv_offset = kv_length + kv_offset, 0
    arguments = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length,
        "q_offset": q_offset, "kv_offset": kv_offset, **kwargs,
    }  # fmt: skip
    return PressMask(
        kwargs.get("attention_mask"),
        arguments,
        ALL_MASK_ATTENTION_FUNCTIONS[native_name(kwargs["config"])],
        stored=stored,
    )


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
    if here.asked is module:
        plan = None if forward is None else forward.session.layers.get(id(module))
        query = _in_order(query, key, None if plan is None else plan.tiles)
        raise AskedError(query, key, logits_of(query, scaling, kwargs), kwargs.get("s_aux"))
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
        bool(store.sealed)
        or (length == 1 and call.tokens.seen_before > 0 and (static is not None or query.device.type == "cpu"))
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
        out, call.lse = _attend_parts(call, query, real, forward)
        result = _out_of_order(ungroup(out, query.shape[0], query.shape[1]).to(query.dtype), key, plan.tiles)
    elif reads_store or pattern is not None:
        reader = None if rereads or not reads_store else plan.reader(call)
        pattern_attention = None if pattern is None else partial(pattern.attend, call)
        out, call.lse = store.attend(query, call.logits, real, call.sinks, reader, pattern_attention)
        result = _out_of_order(ungroup(out, query.shape[0], query.shape[1]).to(query.dtype), key, plan.tiles)
    else:
        keys, values = store.window.filled_keys, store.window.filled_values
        keys, values = (key, value) if is_first else _arranged(keys, values, key, plan.tiles)
        run = native_attention(module)
        result, call.attentions = run(
            module, native_query, keys, values, native(keys.shape[2]), scaling=scaling, dropout=dropout, **kwargs
        )
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


class AskedError(Exception):
    """Signal that ends the forward pass of an attention module once its queries, keys, logits and sinks are computed."""

    def __init__(self, queries: Tensor, keys: Tensor, logits: Logits, sinks: Tensor | None) -> None:
        super().__init__()
        self.queries = queries
        self.keys = keys
        self.logits = logits
        self.sinks = sinks


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
                asked(module, call.hidden_states[:, :1], call.kwargs | {"position_embeddings": e}).queries
                for e in (first, shifted)
            ]
        _ROTATES[module] = not torch.equal(*queries)
    return _ROTATES[module]


def asked(module: nn.Module, hidden_states: Tensor, kwargs: dict[str, Any]) -> AskedError:
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
    before, native, here.asked = here.asked, config._attn_implementation, module
    if native != NAME:
        config._attn_implementation_internal = NAME
    try:
        module.forward(**arguments)
    except AskedError as inputs:
        return inputs
    finally:
        here.asked = before
        if native != NAME:
            config._attn_implementation_internal = native
    raise NotImplementedError(f"{type(module).__name__} did not call its attention function")
