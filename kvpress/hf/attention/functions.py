# SPDX-License-Identifier: Apache-2.0
"""The attention and mask functions that models are given."""

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
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpress.cache.attention import Logits, ungroup
from kvpress.cache.readout import dense_pairs, why_unreadable
from kvpress.cache.window import RealTokens
from kvpress.hf.models import CACHE
from kvpress.hf.session.requests import Request, generated_behind, here
from kvpress.observe.call import LayerCall, rotary_parts

NAME = "kvpress"
KNOWN_ATTENTION_ARGUMENTS = frozenset({"softcap", "s_aux", "position_ids"})
"""Tensors and numbers, beside scaling, that models pass to their attention and that are taken into account."""

FEW, MANY = 16, 1024
"""Up to so many new tokens behind at least so many are read by the store itself, where heads are grouped on a CPU."""


class PressName(str):
    """Our name in a configuration, which remembers the `native` name before; copies of the configuration have that one."""

    native: str

    def __new__(cls, native: str) -> PressName:
        name = super().__new__(cls, NAME)
        name.native = native
        return name

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (self.native,)


def native_name(config: Any) -> str:
    """Return the attention implementation that a configuration has without a press."""
    name: str = config._attn_implementation
    if name == NAME and not isinstance(name, PressName):
        raise RuntimeError(
            f"the attention implementation {NAME!r} works inside `with press(model):` alone, which sets it itself; call "
            "model.set_attn_implementation('sdpa')"
        )
    return getattr(name, "native", name)


def native_attention(module: nn.Module) -> Callable[..., Any]:
    """Return the attention function that a module uses without a press."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(native_name(module.config), eager)


def register() -> None:
    """Make both functions known to transformers under our name."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


@dataclass
class PressMask:
    """What the mask function returns: the 2-D mask as it came, and how to build what the model's own attention wants.

    Models pass masks through untouched, so one object serves layers that use our attention and layers that do not. `stored` is
    how many pairs the model counted in the layer that it asked about, and the position of the first.
    """

    mask: Tensor | None
    arguments: dict[str, Any]
    build: Callable[..., Any]
    built: dict[int, Any] = field(default_factory=dict)
    real_tokens: RealTokens | None = None
    stored: tuple[int, int] | None = None
    later: bool | None = None

    def real(self, call: LayerCall, request: Request | None) -> RealTokens | None:
        """Return the real ones of the tokens seen, one object for all layers; None where nothing is padded."""
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
        """Return the mask of the model's own attention implementation over so many keys, all tokens or those of a window."""
        if keys not in self.built:
            sizes = {}
            if self.stored is not None and keys == self.stored[0]:
                sizes = dict(zip(("kv_length", "kv_offset"), self.stored, strict=True))
            self.built[keys] = self.build(**{**self.arguments, **sizes})
        return self.built[keys]

    def sees_later(self) -> bool:
        """Whether some token of the pass attends to the next one, as those of an image do in some models."""
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
        """Return the mask of some of the queries, as models ask for it where later layers read the newest tokens only."""
        arguments = {**self.arguments, "allow_is_causal_skip": False}
        return PressMask(self.mask, arguments, lambda **given: self.build(**given)[index], real_tokens=self.real_tokens)

    def of_tokens(self, index: Tensor, real: Tensor) -> PressMask:
        """Return the mask of a pass over some tokens of a prompt: those at `index [B, m]`, of which some are `real [B, m]`."""
        left = None if bool(real.all()) else real
        if self.arguments.get("mask_function", causal_mask_function) is causal_mask_function:
            lengths = {"q_length": index.shape[1], "kv_length": index.shape[1]}
            return PressMask(left, {**self.arguments, **lengths, "attention_mask": left}, self.build)

        def build(**given: Any) -> Tensor:
            whole = self.build(**{**given, "allow_is_causal_skip": False})
            if not isinstance(whole, Tensor) or whole.dim() != 4:
                raise NotImplementedError(
                    "this model's masks are not known token by token; use its sdpa or eager attention"
                )
            rows = torch.arange(len(index), device=index.device)[:, None, None]
            chosen = whole.expand(len(index), *whole.shape[1:])[rows, 0, index[:, :, None], index[:, None]]
            hidden = ~(real[:, None] | torch.eye(index.shape[1], dtype=torch.bool, device=index.device))
            return chosen.masked_fill(hidden, False if chosen.dtype == torch.bool else torch.finfo(chosen.dtype).min)[
                :, None
            ]

        return PressMask(left, self.arguments, build)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"this model computes with its attention mask (it asked for `{name}`), which compressed attention does not know"
        )


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, **kwargs: Any
) -> PressMask:
    """Mask function registered as `kvpress`: keeps the arguments for later."""
    stored = kv_length, kv_offset
    if kwargs.get("local_size") is None:
        # Layers of ours say how many pairs they store, for models without a press. The model's own attention gets all tokens.
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
    """Attention function registered as `kvpress`: `query [B, Hq, Q, D]`, new `key` and `value [B, H, Q, D]`."""
    forward = here.forward
    if here.asked is module:
        plan = None if forward is None else forward.session.layers.get(id(module))
        query = _in_order(query, key, None if plan is None else plan.tiles)
        raise AskedError(query, key, logits_of(query, scaling, kwargs), kwargs.get("s_aux"))
    call = None if forward is None else forward.call
    lent = None if forward is None or call is not None else forward.lent_call(key)
    call = (
        call if lent is None else replace(lent, layer=replace(lent.layer, module=module), tokens=replace(lent.tokens))
    )
    native = attention_mask.native if isinstance(attention_mask, PressMask) else lambda keys: attention_mask
    if forward is None or call is None or call.layer.module is not module or call.store is None:
        run = native_attention(module)
        return run(module, query, key, value, native(key.shape[2]), scaling=scaling, dropout=dropout, **kwargs)
    if attention_mask is not None and not isinstance(attention_mask, PressMask):
        raise NotImplementedError("4-D attention masks are not supported; pass the 2-D mask of real tokens")
    check_known(module, kwargs)

    store, length = call.store, query.shape[2]
    session, static, whole = forward.session, forward.static, forward.watch is not None or lent is not None
    plan = session.layers[id(lent.layer.module if lent else module)]
    fresh, handed = call.tokens.seen_before == 0, query
    if plan.tiles is None:
        plan.tiles = _tiles(module, call, key, value)
    query = _in_order(query, key, plan.tiles)
    call.queries = query
    call.logits = logits_of(query, scaling, kwargs)
    call.sinks = kwargs.get("s_aux")
    if static is not None:
        real = static.real_tokens
    else:
        real = None if attention_mask is None else attention_mask.real(call, forward.request)
    call.tokens.mask = None if real is None else real.real
    # torch's CPU sdpa is slow for a single query over grouped heads, so there the store always reads itself.
    own = (
        bool(store.sealed)
        or (length == 1 and call.tokens.seen_before > 0 and (static is not None or query.device.type == "cpu"))
        or _few_behind_many(module, call, attention_mask)
    )
    pattern = plan.pattern if call.phase == "prefill" and length > 1 and not whole else None
    if pattern is not None and attention_mask is not None and attention_mask.sees_later():
        raise NotImplementedError(
            f"{type(module).__name__} lets the tokens of an image see later ones, and a sparse reading of the prompt is "
            "causal: leave out the pattern (`reach` of video_xl2)"
        )
    if own or pattern is not None:
        reader = None if whole or not own else plan.reader(call)
        opened = None if pattern is None else partial(pattern.attend, call)
        out, call.lse = store.attend(query, call.logits, real, call.sinks, reader, opened)
        result = _out_of_order(ungroup(out, query.shape[0], query.shape[1]).to(query.dtype), key, plan.tiles)
    else:
        keys, values = store.window.filled_keys, store.window.filled_values
        keys, values = (key, value) if fresh else _arranged(keys, values, key, plan.tiles)
        run = native_attention(module)
        result, call.attentions = run(
            module, handed, keys, values, native(keys.shape[2]), scaling=scaling, dropout=dropout, **kwargs
        )
    if plan.selector is not None and not whole:
        plan.selector.after(call)
    if static is None and not whole:
        session.observe(call)
    if forward.weights and not whole and call.attentions is None:
        settings = {"scaling": scaling, "dropout": dropout, **kwargs}
        return result, _weights(module, call, handed, key, plan.tiles, attention_mask, settings)
    return result, call.attentions


def _weights(
    module: nn.Module, call: LayerCall, query: Tensor, key: Tensor, tiles: int, mask: PressMask | None, settings: Any
) -> Tensor:
    """Return the weights `[B, Hq, Q, stored]` of new tokens on the pairs of a layer, by the model's eager attention.

    Raises:
        ValueError: the layer does not hold all its pairs as they came.
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
        # Rows hold as many pairs as each other, so that only the new tokens hide later ones.
        length = query.shape[2]
        future = torch.ones(length, keys.shape[2], dtype=torch.bool, device=query.device).triu(
            keys.shape[2] - length + 1
        )
        visible = torch.zeros(future.shape, dtype=query.dtype, device=query.device)
        visible = visible.masked_fill(future, torch.finfo(query.dtype).min)[None, None]
    weights: Tensor = native_attention(module)(module, query, keys, values, visible, **settings)[1]
    return weights


def _few_behind_many(module: nn.Module, call: LayerCall, mask: PressMask | None) -> bool:
    """Whether few tokens read a long cache on a CPU, where torch's sdpa first copies all pairs for every query head.

    Such passes verify drafts. Only passes that are causal and nothing more are meant: the store hides later tokens alone.
    """
    queries = call.queries
    return (
        queries is not None
        and call.store is not None
        and queries.device.type == "cpu"
        and 1 < queries.shape[2] <= FEW
        and call.tokens.seen_before >= MANY
        and queries.shape[1] > call.store.heads
        and mask is not None
        and mask.arguments.get("mask_function", causal_mask_function) is causal_mask_function
        and native_name(module.config) == "sdpa"
    )


def check_known(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse arguments that a module hands its attention and that ours would leave out."""
    unknown = [n for n, v in kwargs.items() if isinstance(v, (Tensor, float)) and n not in KNOWN_ATTENTION_ARGUMENTS]
    if unknown:
        raise NotImplementedError(
            f"{type(module).__name__} passes {unknown} to its attention, which compressed attention does not know"
        )


def logits_of(query: Tensor, scaling: float | None, kwargs: dict[str, Any]) -> Logits:
    """Return how a model forms logits, from the arguments of its attention."""
    return Logits(query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs.get("softcap"))


def _tiles(module: nn.Module, call: LayerCall, key: Tensor, value: Tensor) -> int:
    """Return how often the attention is handed the kv heads as a whole, one after the other; 1 where it gets them as written.

    Raises:
        NotImplementedError: it is handed other keys or values than those in the cache.
    """
    assert call.written is not None  # noqa: S101 - for type checkers
    given, written = (key, value), call.written
    times = key.shape[1] // written[0].shape[1]

    def same(arranged: Callable[[Tensor], Tensor]) -> bool:
        pairs = [(new, arranged(old)) for new, old in zip(given, written, strict=True)]
        return all(new is old or (new.shape == old.shape and torch.equal(new, old.to(new))) for new, old in pairs)

    if same(lambda old: old) or same(lambda old: old.repeat_interleave(times, dim=1)):
        return 1
    if same(lambda old: old.repeat(1, times, 1, 1)):
        return times
    raise NotImplementedError(
        f"{type(module).__name__} hands its attention other keys or values than those in its cache, which compressed attention "
        "cannot read"
    )


def _in_order(query: Tensor, key: Tensor, tiles: int | None) -> Tensor:
    """Put query heads that read the same kv head next to each other, as the store expects."""
    if tiles in (None, 1):
        return query
    return query.unflatten(1, (tiles, key.shape[1] // tiles, -1)).transpose(1, 2).flatten(1, 3)


def _out_of_order(output: Tensor, key: Tensor, tiles: int) -> Tensor:
    """Undo `_in_order` for an output `[B, Q, Hq, Dv]`."""
    if tiles == 1:
        return output
    return output.unflatten(2, (key.shape[1] // tiles, tiles, -1)).transpose(2, 3).flatten(2, 4)


def _arranged(keys: Tensor, values: Tensor, key: Tensor, tiles: int) -> tuple[Tensor, Tensor]:
    """Return stored keys and values with their heads arranged as those of `key`, which the attention was handed."""
    times = key.shape[1] // keys.shape[1]
    if times == 1:
        return keys, values
    if tiles == 1:
        return keys.repeat_interleave(times, dim=1), values.repeat_interleave(times, dim=1)
    return keys.repeat(1, times, 1, 1), values.repeat(1, times, 1, 1)


class AskedError(Exception):
    """Ends the forward pass of an attention module that was only asked for its queries, new keys, logits and sinks."""

    def __init__(self, queries: Tensor, keys: Tensor, logits: Logits, sinks: Tensor | None) -> None:
        super().__init__()
        self.queries = queries
        self.keys = keys
        self.logits = logits
        self.sinks = sinks


_ROTATES: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def rotates(module: nn.Module, call: LayerCall) -> bool:
    """Whether a layer turns its queries by the rotary embedding that it is handed; asked of its first token, once.

    Models leave single layers without, each in a way of its own.
    """
    given: Any = call.kwargs.get("position_embeddings")
    if rotary_parts(given) is None:
        return False
    if module not in _ROTATES:
        first = given[:, :1] if isinstance(given, Tensor) else tuple(part[:, :1] for part in given)
        other = first + 1 if isinstance(first, Tensor) else tuple(part + 1 for part in first)
        with torch.no_grad():
            found = [
                asked(module, call.hidden_states[:, :1], call.kwargs | {"position_embeddings": e}).queries
                for e in (first, other)
            ]
        _ROTATES[module] = not torch.equal(*found)
    return _ROTATES[module]


def asked(module: nn.Module, hidden_states: Tensor, kwargs: dict[str, Any]) -> AskedError:
    """Return what an attention module would make of `hidden_states [B, Q, hidden]` and the other arguments of its forward.

    That is its queries `[B, Hq, Q, D]`, keys `[B, H, Q, D]` and how it reads.
    """
    register()
    # Models may let layers leave things for each other in a dictionary.
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
    except AskedError as found:
        return found
    finally:
        here.asked = before
        if native != NAME:
            config._attn_implementation_internal = native
    raise NotImplementedError(f"{type(module).__name__} did not call its attention function")
