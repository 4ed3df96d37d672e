"""Every contact with transformers: the cache layer, the attention and mask functions, the session that installs them.

How a forward pass goes inside `with press(model)`:

1. a hook before each attention module puts our layer into the cache and leaves a `LayerCall` on the module;
2. `PressLayer.update` stores the new keys and values;
3. `attention` runs the model's own implementation while everything is still in the window, and reads all parts of the
   store otherwise;
4. a hook after the module lets the press evict, and the codec encode;
5. a hook after the decoder does the same for presses that look at all layers together (`kvpress.passes`).

Where decode steps are replayed (`capture=True`), the whole forward pass is static: 2. writes the token at the window's cursor,
and 4. follows for all layers once the pass is over.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial, update_wrapper
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    Pipeline,
)
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, get_layer_types_and_kwargs
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.pipelines import PIPELINE_REGISTRY

from kvpress.api import reference_path
from kvpress.attention import Logits, group_queries, ungroup
from kvpress.cache.store import KVStore, Reader
from kvpress.cache.window import Columns, Cursor
from kvpress.capture import SPARE, GraphRecorder, Outputs, Recorder, Replay
from kvpress.checks import check_finite, check_forward, check_generate, check_model, setting
from kvpress.context import LayerCall, Phase
from kvpress.kernels.coded import per_pair, turn_halves
from kvpress.passes import TOKENS, Pass, ReadTokens, Watch

if TYPE_CHECKING:
    from kvpress.presses.base import BasePress
    from kvpress.sparse.base import Selector

__all__ = [
    "PIPELINE_REGISTRY", "AutoModelForCausalLM", "Cache", "Pipeline", "PressLayer", "Session", "load", "new_cache", "session",
]  # fmt: skip

NAME = "kvpress"
KNOWN_ATTENTION_ARGUMENTS = frozenset({"softcap", "s_aux", "position_ids"})
"""Tensors and numbers, beside scaling, that models pass to their attention and that are taken into account."""

_CALL = "_kvpress_call"
_ASKED = "_kvpress_asked"
_sessions: dict[int, Session] = {}
"""Active sessions by the id of every configuration they switched (configurations are not hashable)."""


class PressLayer(CacheLayerMixin):
    """One full-attention layer of a cache, kept in a `KVStore`.

    `get_seq_length` is the number of tokens seen, never of pairs stored: positions, later turns and the slicing of
    `generate` depend on it.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self) -> None:
        self.store: KVStore | None = None
        self.call: LayerCall | None = None
        self.static = False
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.batch_size = key_states.shape[0]
        self.store = KVStore(key_states, value_states)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.store is None:
            self.lazy_initialization(key_states, value_states)
            return self.update(key_states, value_states)
        if self.call is None and self.store.sealed:
            raise RuntimeError(
                "this cache holds compressed pairs and can only be read inside a press: put the call inside "
                "`with press(model):`, or `with kvpress.reading(model):` to read it without compressing further"
            )
        if self.static:
            self.store.window.write(key_states, value_states)
        else:
            self.store.append(key_states, value_states)
        if self.call is None:
            return self.store.window.filled_keys, self.store.window.filled_values
        self.call.store = self.store
        return key_states, value_states

    @property
    def keys(self) -> Tensor | None:
        """Stored keys as one dense tensor `[B, H, n, D]` for inspection: a copy, unless nothing is sealed yet."""
        return self._dense(0)

    @property
    def values(self) -> Tensor | None:
        """Stored values as one dense tensor `[B, H, n, Dv]` for inspection: a copy, unless nothing is sealed yet."""
        return self._dense(1)

    def _dense(self, which: int) -> Tensor | None:
        if self.store is None:
            return None
        window = (self.store.window.filled_keys, self.store.window.filled_values)[which]
        if not self.store.sealed:
            return window
        if len(set(self.store.stored())) > 1:
            raise ValueError("heads hold different numbers of pairs: see kvpress.kept_positions and the layer's store")
        whole = self.store.open_segment(None)
        parts = [*self.store.segments, whole]
        shape = (self.store.batch, self.store.heads, -1, window.shape[-1])
        return torch.cat([part.read(slice(None))[which].reshape(shape) for part in parts], dim=2)

    def get_seq_length(self) -> int:
        return 0 if self.store is None else self.store.seen

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        if self.store is not None:
            rows = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
            self.store.select_rows(rows)
            self.batch_size = self.store.batch

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.store is not None:
            self.batch_select_indices(torch.arange(self.store.batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as 0 or negative, got {tokens_to_remove}")
        if tokens_to_remove and self.store is not None:
            self.store.crop(-tokens_to_remove)

    def activate_past_recording(self) -> None:
        raise NotImplementedError("assisted decoding is not supported: it takes back tokens that a press has consumed")

    def offload(self) -> None:
        if self.store is not None:
            self.store.to("cpu")

    def prefetch(self) -> None:
        if self.store is not None:
            self.store.to(self.device)


@dataclass
class PressMask:
    """What the mask function returns: the 2-D mask as it came, and how to build what the model's own attention wants.

    Models pass masks through untouched, so one object serves layers that use our attention and layers that do not.
    """

    mask: Tensor | None
    arguments: dict[str, Any]
    build: Callable[..., Any]
    built: list[Any] = field(default_factory=list)
    columns: Columns | None = None

    def real(self, seen: int) -> Columns | None:
        """Return which of the tokens seen are real, one object for all layers; None where nothing is padded."""
        if self.columns is None and self.mask is not None:
            self.columns = Columns(self.mask[:, :seen])
        return self.columns

    def native(self) -> Any:
        """Return the mask of the model's own attention implementation."""
        if not self.built:
            self.built.append(self.build(**self.arguments))
        return self.built[0]


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, **kwargs: Any
) -> PressMask:
    """Mask function registered as `kvpress`: keeps the arguments for later."""
    session = _sessions[id(kwargs["config"])]
    arguments = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length,
        "q_offset": q_offset, "kv_offset": kv_offset, **kwargs,
    }  # fmt: skip
    return PressMask(kwargs.get("attention_mask"), arguments, ALL_MASK_ATTENTION_FUNCTIONS[session.native_name])


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
    if _ASKED in module.__dict__:
        raise _QueriesFoundError(query)
    call: LayerCall | None = module.__dict__.get(_CALL)
    session = _sessions[id(module.config)]
    native = attention_mask.native if isinstance(attention_mask, PressMask) else lambda: attention_mask
    run = session.native_attention(module)
    if call is None or call.store is None:
        return run(module, query, key, value, native(), scaling=scaling, dropout=dropout, **kwargs)
    if attention_mask is not None and not isinstance(attention_mask, PressMask):
        raise NotImplementedError("4-D attention masks are not supported; pass the 2-D mask of real tokens")
    unknown = [n for n, v in kwargs.items() if isinstance(v, (Tensor, float)) and n not in KNOWN_ATTENTION_ARGUMENTS]
    if unknown:
        raise NotImplementedError(
            f"{type(module).__name__} passes {unknown} to its attention, which compressed attention does not know"
        )

    store, length = call.store, query.shape[2]
    call.queries = query
    call.logits = Logits(query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs.get("softcap"))
    call.sinks = kwargs.get("s_aux")
    static = session.static
    if static is not None:
        columns = static.columns
    else:
        columns = None if attention_mask is None else attention_mask.real(store.seen)
    call.columns = None if columns is None else columns.real
    # torch's CPU sdpa is slow for a single query over grouped heads, so there the store always reads itself.
    own = bool(store.sealed) or (
        length == 1 and call.seen_before > 0 and (static is not None or query.device.type == "cpu")
    )
    if own:
        plan = session.layers[id(module)]
        whole = session.watch is not None
        out, call.lse = store.attend(query, call.logits, columns, call.sinks, None if whole else plan.reader(call))
        result = ungroup(out, query.shape[0], query.shape[1]).to(query.dtype)
        if plan.selector is not None and length == 1 and store.segments and not whole:
            plan.selector.after(call)
    else:
        keys, values = store.window.filled_keys, store.window.filled_values
        result, call.attentions = run(module, query, keys, values, native(), scaling=scaling, dropout=dropout, **kwargs)
    if static is None and session.watch is None:
        session.observe(call)
    return result, call.attentions


class _QueriesFoundError(Exception):
    """Ends the forward pass of an attention module that was only asked for its queries."""

    def __init__(self, queries: Tensor) -> None:
        super().__init__()
        self.queries = queries


def queries_of(module: nn.Module, call: LayerCall) -> Tensor:
    """Return the queries `[B, Hq, Q, D]` that an attention module under a press would make of the input of a call."""
    # Models may let layers leave things for each other in a dictionary.
    arguments = {name: dict(value) if isinstance(value, dict) else value for name, value in call.kwargs.items()}
    arguments |= {"hidden_states": call.hidden_states, "attention_mask": None, "past_key_values": None}
    module.__dict__[_ASKED] = True
    try:
        module.forward(**arguments)
    except _QueriesFoundError as found:
        return found.queries
    finally:
        del module.__dict__[_ASKED]
    raise NotImplementedError(f"{type(module).__name__} did not call its attention function")


class Session:
    """One `with press(model)` block: installs the hooks, restores everything on exit.

    `cache` is the cache last used inside the block; `evict=False` reads compressed caches without evicting at prefill. With a
    `recorder`, decode steps are recorded and replayed. `watch` is set while the session itself reads behind a cache.
    """

    def __init__(
        self, press: BasePress, model: PreTrainedModel, evict: bool = True, recorder: Recorder | None = None
    ) -> None:
        self.press = press
        self.model = model
        self.evict = evict
        self.cache: Cache | None = None
        self.prefill_until = 0
        self.follows = {phase for phase in press.follows if evict or phase == "decode"}
        self.passed: list[LayerCall] = []
        self.watch: Watch | None = None
        self.native_name = model.config._attn_implementation
        self.modules = [m for m in model.modules() if is_attention(m)]
        self.layers: dict[int, LayerPlan] = {}
        self.selectors: dict[int, Selector] = {}
        self.following: dict[int, nn.Module] = {}
        text = model.config.get_text_config(decoder=True)
        self.kinds = layer_types(text) if self.modules else []
        self.full = {i for i, kind in enumerate(self.kinds) if kind == "full_attention"}
        self.decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
        self.captured = None if recorder is None else CapturedForward(self, model.forward, recorder)
        self._undo: list[Callable[[], Any]] = []

    @property
    def static(self) -> StaticPass | None:
        """The static pass under way, if any."""
        return None if self.captured is None else self.captured.under_way

    def enter(self) -> None:
        """Check the model, then install; nothing is changed if a check fails."""
        self.press.validate()
        check_model(self.model, self.press, bool(self.modules), bool(self.full))
        if self.captured is not None:
            check_capture(self)
        self.press.post_init_from_model(self.model)
        growing = [i for i, module in enumerate(self.modules) if module.layer_idx in self.full]
        self.selectors = self.press.selectors(self.model, growing)
        self.following = {
            layer: self.modules[later]
            for layer, later in itertools.pairwise(growing)
            if later in self.selectors and self.selectors[later].looks_ahead
        }
        try:
            self._install()
        except BaseException:
            self.exit()
            raise

    def _install(self) -> None:
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, mask)
        before = {id(c): (c, c._attn_implementation) for c in _configs(self.model)}
        self._undo.append(lambda: _restore(before))
        self.model.set_attn_implementation(NAME)
        switched = [id(c) for c, _ in before.values() if c._attn_implementation == NAME]
        for module in self.modules:
            if id(module.config) not in switched:
                raise NotImplementedError(
                    f"{type(module).__name__} did not take the attention function `{NAME}`: this model does not use "
                    "the attention interface of transformers"
                )
        for key in switched:
            _sessions[key] = self
            self._undo.append(partial(_sessions.pop, key, None))
        rotary = getattr(self.decoder, "rotary_emb", None)
        self.watched = self.press.decoding_observers()
        for module in self.modules:
            self.layers[id(module)] = LayerPlan(self, module)
            handles = [
                module.register_forward_pre_hook(self._before, with_kwargs=True),
                module.register_forward_hook(self._after, with_kwargs=True),
            ]
            self._undo += [handle.remove for handle in handles]
            self._undo.append(partial(self._release, module))
            if rotary is not None and not hasattr(module, "rotary_emb"):
                # Presses written for NVIDIA kvpress read it there.
                module.__dict__["rotary_emb"] = rotary
                self._undo.append(partial(module.__dict__.pop, "rotary_emb", None))
        self._undo.append(self.decoder.register_forward_pre_hook(self._check, with_kwargs=True).remove)
        if self.follows:
            self._undo.append(self.decoder.register_forward_hook(self._pass_over, with_kwargs=True).remove)
        if hasattr(self.model, "generate"):
            self._replace("generate", self._generate(self.model.generate))
        if self.captured is not None:
            self._replace("forward", self.captured)
            self._undo.append(self.captured.forget)

    def _replace(self, name: str, function: Callable[..., Any]) -> None:
        """Put `function` in the place of a method of the model."""
        attributes = self.model.__dict__
        own = {name: attributes[name]} if name in attributes else {}
        attributes[name] = function
        self._undo += [partial(attributes.update, own), partial(attributes.pop, name, None)]

    def exit(self) -> None:
        """Undo everything, newest first."""
        while self._undo:
            self._undo.pop()()
        self.press.__dict__["_last_cache"] = self.cache

    # -- hooks -----------------------------------------------------------------------------------------------

    def _generate(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.prefill_until = check_generate(self.model, *args, **kwargs)
            if self.captured is not None:
                check_captured_generate(self.model, *args, **kwargs)
            try:
                return generate(*args, **kwargs)
            finally:
                self.prefill_until = 0
                if self.captured is not None:
                    self.captured.forget()

        return wrapped

    def _check(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        self.passed = []
        if self.watch is None:
            check_forward(self.press, args, kwargs, self.model.config, self.prefill_until if self.evict else None)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        if not isinstance(cache, Cache):
            return
        layer = adopt_layer(cache, module) if module.layer_idx in self.full else None
        if layer is None:
            return
        self.cache = cache
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        plan = self.layers[id(module)]
        length = hidden.shape[1] if hidden is not None else 1
        layer.static = self.static is not None
        call = LayerCall(
            module=module,
            store=layer.store,  # type: ignore[arg-type]
            layer=plan.index,
            layers=len(self.modules),
            kwargs=kwargs,
            hidden_states=hidden,  # type: ignore[arg-type]
            seen_before=layer.get_seq_length() - (length if layer.static else 0),
            rotate=plan.rotate,
            rotary=None if plan.rotary is None or hidden is None else partial(plan.rotary, hidden),
            shared=cache.__dict__.setdefault("_kvpress_shared", {}),
        )
        call.phase = self._phase(call.seen_before, length)
        layer.call = call
        module.__dict__[_CALL] = call
        if plan.following is not None and call.phase == "decode" and self.watch is None:
            self._look_ahead(plan.following, call)

    def _look_ahead(self, following: nn.Module, call: LayerCall) -> None:
        """Tell the next layer's selector what that layer will ask, as far as this layer's input says."""
        layer = call.kwargs["past_key_values"].layers[following.layer_idx]
        selector = self.layers[id(following)].selector
        if selector is None or not isinstance(layer, PressLayer) or layer.store is None:
            return
        queries = queries_of(following, call)
        selector.prefetch(layer.store, group_queries(queries, layer.store.heads))

    def _phase(self, seen_before: int, length: int) -> Phase:
        fresh = seen_before == 0 or length > 1 or seen_before < self.prefill_until
        return "prefill" if fresh else "decode"

    def observe(self, call: LayerCall) -> None:
        """Let the press's observers see a pass, where a later eviction needs it."""
        evicting = call.phase == "prefill" and self.evict
        wanted = self.press.observers() if evicting else self.watched
        for name, make in wanted.items():
            call.store.observers.setdefault(name, make()).observe(call)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        del args, kwargs, output
        call = self._release(module)
        if call is None:
            return
        if self.static is not None:
            self.static.calls.append(call)
        elif self.watch is not None:
            self.watch(call)
        else:
            self.follow(call)
            if self.follows:
                self.passed.append(self._kept_of(call))

    def follow(self, call: LayerCall) -> None:
        """Let the press evict, and the codec encode, once a layer's pass is over."""
        store = call.store
        if store is None or call.queries.numel() == 0 or store.seen < self.prefill_until:
            return
        if call.phase == "decode":
            store.since_eviction += 1
            self.press.after_decode(call)
        elif self.evict:
            self.press.after_prefill(call)
        if call.phase not in self.follows:
            self._seal(call)

    def _seal(self, call: LayerCall) -> None:
        """Drop what only this pass's eviction needed and encode what is ready, once a layer holds what it will keep."""
        store, plan = call.store, self.layers[id(call.module)]
        if call.phase == "prefill" and self.evict:
            store.forget([*self.watched, TOKENS] if self.follows else self.watched)
        if plan.codec is not None:
            if call.phase == "prefill":
                check_finite(store.window.filled_keys, store.window.filled_values, call.layer)
            store.settle(plan.codec, call.columns, wait=call.phase == "decode", call=call)
        if plan.selector is not None:
            for segment in store.segments:
                plan.selector.prepare(segment)

    def _kept_of(self, call: LayerCall) -> LayerCall:
        """Return a call without the tensors of its pass: those of all layers together would outweigh the cache."""
        rotary, empty = self.layers[id(call.module)].rotary, call.queries.new_zeros(1, 1, 1)
        return replace(
            call,
            kwargs={},
            hidden_states=empty[:, :0],
            queries=call.queries.new_empty(*call.queries.shape[:2], 0, call.queries.shape[3]),
            lse=None,
            attentions=None,
            rotary=None if rotary is None else partial(rotary, empty),
        )

    def _pass_over(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        del module, output
        calls, self.passed = [call for call in self.passed if call.store is not None], []
        if calls:
            self.finish(calls, kwargs.get("input_ids", args[0] if args else None), kwargs.get("position_ids"))

    def finish(self, calls: list[LayerCall], ids: Tensor | None, positions: Tensor | None) -> None:
        """Remember what a pass read, and let the press act on all layers together where it follows such passes."""
        store, phase = calls[0].store, calls[0].phase
        tokens = store.observers.setdefault(TOKENS, ReadTokens())
        assert isinstance(tokens, ReadTokens)  # noqa: S101 - for type checkers
        tokens.add(ids, calls[0].seen_before, store.seen - calls[0].seen_before)
        if store.seen < self.prefill_until:
            return
        if phase in self.follows:
            position = (
                torch.full((1, 1), store.seen - 1, device=store.window.keys.device) if positions is None else positions
            )
            self.press.after_pass(Pass(self.cache, calls, tokens.ids, position[..., -1:] + 1, self))
            for call in calls:
                self._seal(call)
        if phase == "prefill":
            tokens.forget()

    # -- reading behind a cache ------------------------------------------------------------------------------

    def read(self, done: Pass, ids: Tensor, watch: Watch | None) -> None:
        """Read `ids [B, m]` behind the cache of a pass and take them back."""
        others = [(layer, _copied(layer.__dict__)) for layer in done.cache.layers if not isinstance(layer, PressLayer)]
        held = [
            (call.store, call.store.seen, call.store.window.length, dict(call.store.window.side)) for call in done.calls
        ]
        try:
            self._run(done, ids, done.position + torch.arange(ids.shape[1], device=done.position.device), watch)
        finally:
            for store, seen, length, side in held:
                store.window.crop(store.window.length - length)
                store.seen, store.window.side = seen, side
            for layer, state in others:
                layer.__dict__.update(state)

    def reread(self, done: Pass, tokens: int) -> None:
        """Read the newest tokens of a pass once more at their positions; the new pairs take the place of the old."""
        stores = [call.store for call in done.calls]
        most = min(0 if done.ids is None else done.ids.shape[1], done.open_tokens)
        if done.ids is None or not 1 <= tokens <= most:
            raise ValueError(
                f"can read 1 to {most} of the newest tokens once more, got {tokens}: older ones are sealed"
            )
        if len(stores) != len(done.cache.layers):
            raise NotImplementedError(
                f"{type(self.model).__name__} has layers whose caches cannot take back tokens, so none can be read again"
            )
        sides = [dict(store.window.side) for store in stores]
        since = [store.since_eviction for store in stores]
        for store in stores:
            store.take_back(tokens)
        self._run(
            done, done.ids[:, -tokens:], done.position + torch.arange(-tokens, 0, device=done.position.device), None
        )
        for store, side, generated in zip(stores, sides, since, strict=True):
            store.window.side, store.since_eviction = side, generated

    def _run(self, done: Pass, ids: Tensor, positions: Tensor, watch: Watch | None) -> None:
        """Run the decoder alone: every hook of the session stands back, but for `watch`."""
        mask, seen = done.mask, done.seen
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(ids.shape)], dim=1)[:, : seen + ids.shape[1]]
        self.watch = watch or (lambda call: None)
        try:
            with torch.no_grad():
                self.decoder(
                    input_ids=ids,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=done.cache,
                    use_cache=True,
                )
        finally:
            self.watch = None

    def _release(self, module: nn.Module) -> LayerCall | None:
        """Take the call off a module and its cache layer, so that neither keeps the other alive."""
        call: LayerCall | None = module.__dict__.pop(_CALL, None)
        if call is not None:
            layer = call.kwargs["past_key_values"].layers[module.layer_idx]
            layer.call, layer.static = None, False
        return call

    def native_attention(self, module: nn.Module) -> Callable[..., Any]:
        """Return the attention function that the model used before the session."""
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.native_name, eager)


class LayerPlan:
    """What one attention layer does under a press: the same in every pass, so it is worked out once per session."""

    def __init__(self, session: Session, module: nn.Module) -> None:
        self.index = session.modules.index(module)
        self.codec = session.press.codec_for(self.index)
        self.selector = session.selectors.get(self.index)
        self.following = session.following.get(self.index)
        self.rotate = find_rotate(module)
        self.rotary = find_rotary(module, session.decoder)

    def reader(self, call: LayerCall) -> Reader | None:
        """Return what a decode step reads sealed pairs with; None reads them all."""
        return None if self.selector is None else partial(self.selector.attend, call)


@dataclass
class StaticPass:
    """A forward pass that leaves the host's counters alone: the real tokens it sees, and the layers' calls it made."""

    columns: Columns | None
    calls: list[LayerCall] = field(default_factory=list)


class CapturedForward:
    """Stands in for a model's forward: replays the decode steps of one token per row, passes all other calls on."""

    def __init__(self, session: Session, forward: Callable[..., Any], recorder: Recorder) -> None:
        update_wrapper(self, forward, updated=())
        self.session = session
        self.forward = forward
        self.names = list(inspect.signature(forward).parameters)
        self.replay = Replay(recorder, self._step)
        self.under_way: StaticPass | None = None
        self.kind: type[Any] = dict
        self.forget()

    def forget(self) -> None:
        """Let go of the cache."""
        self.replay.forget()
        self.calls: list[LayerCall] = []
        self.columns: Columns | None = None
        self.rest: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        if arguments.get("output_hidden_states", getattr(self.session.model.config, "output_hidden_states", False)):
            raise ValueError("a replayed step gives logits only: leave out output_hidden_states or use capture=False")
        stores = self._stores(arguments)
        if not stores:
            return self.forward(**arguments)
        ids, mask = arguments["input_ids"], arguments.pop("attention_mask", None)
        columns = None if mask is None else Columns(mask.to(ids.device, torch.bool))
        cursors = self._cursors(stores, columns)
        if cursors is None:
            return self.forward(**arguments, attention_mask=mask)
        if arguments.get("position_ids") is None:
            arguments["position_ids"] = torch.full((1, 1), stores[0].seen, device=ids.device)
        inputs = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        for store in stores:
            store.count_token()
        self.columns = columns
        outputs = self.replay(cursors, inputs, {n: v for n, v in arguments.items() if n not in inputs})
        for call in self.calls:
            call.columns, call.seen_before = None if columns is None else columns.real, call.store.seen - 1
            self.session.follow(call)
        if self.session.follows:
            self.session.finish(self.calls, ids, arguments["position_ids"])
        return self.kind(**outputs, **self.rest)

    def _step(self, inputs: dict[str, Tensor], settings: dict[str, Any]) -> Outputs:
        """Run the model on fixed inputs; what is kept of the pass is what every replay of it needs."""
        self.under_way = StaticPass(self.columns)
        try:
            output = self.forward(**inputs, **settings)
            self.calls = self.under_way.calls
        finally:
            self.under_way = None
        tensors = {name: value for name, value in output.items() if isinstance(value, Tensor)}
        self.kind, self.rest = type(output), {name: value for name, value in output.items() if name not in tensors}
        return tensors

    def _stores(self, arguments: dict[str, Any]) -> list[KVStore]:
        """Return the stores of a call that reads one token per row behind a cache of ours; none for other calls."""
        cache, ids, mask = (arguments.get(name) for name in ("past_key_values", "input_ids", "attention_mask"))
        if not isinstance(cache, Cache) or not isinstance(ids, Tensor) or torch.is_grad_enabled():
            return []
        stores = [layer.store for layer in cache.layers if isinstance(layer, PressLayer) and layer.store is not None]
        seen, config = cache.get_seq_length(), self.session.model.config
        # Models of several modalities count positions in their own way.
        placed = arguments.get("position_ids") is not None or config.get_text_config() is config
        fits = (
            placed
            and len(stores) == len(self.session.modules)
            and tuple(ids.shape) == (stores[0].batch, 1)
            and all(store.seen == seen for store in stores)
            and seen >= self.session.prefill_until
            and (mask is None or (isinstance(mask, Tensor) and tuple(mask.shape) == (stores[0].batch, seen + 1)))
            and arguments.get("return_dict") is not False
        )
        return stores if fits else []

    def _cursors(self, stores: list[KVStore], columns: Columns | None) -> list[Cursor] | None:
        """Return where every layer writes its token, or None if some layer cannot take it on the device alone."""
        cursors = []
        for plan, store in zip(self.session.layers.values(), stores, strict=True):
            cursor = store.ready(columns, SPARE if plan.codec is None else min(SPARE, plan.codec.group))
            if cursor is None:
                return None
            cursors.append(cursor)
        return cursors


def check_capture(session: Session) -> None:
    """Refuse models and presses whose decode steps cannot be replayed."""
    name, press = type(session.model).__name__, type(session.press).__name__
    other = sorted({kind for kind in session.kinds if kind != "full_attention"})
    if other:
        raise ValueError(
            f"capture needs full attention in every layer, but {name} has {other[0]} layers, whose caches move with every "
            "token; use capture=False"
        )
    if session.press.reads_host:
        raise ValueError(
            f"{press} fetches pairs from host memory for every token, which a replayed step cannot; use capture=False"
        )
    if session.press.decoding_observers():
        raise ValueError(f"{press} watches every generated token, which a replayed step cannot show; use capture=False")
    if "decode" in session.follows:
        raise ValueError(f"{press} acts on whole passes while tokens are generated; use capture=False")
    if "dynamic" in str(getattr(getattr(session.decoder, "rotary_emb", None), "rope_type", "")):
        raise ValueError(f"the rotary embedding of {name} changes with the length on the host; use capture=False")
    if "position_ids" not in inspect.signature(session.model.forward).parameters:
        raise ValueError(f"{name} takes no position_ids, so its positions are set on the host; use capture=False")


def check_captured_generate(model: Any, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> None:
    """Refuse ways of generating that rearrange the cache at every token."""
    del inputs
    beams = setting("num_beams", kwargs, (generation_config, model.generation_config))
    if beams is not None and beams > 1:
        raise ValueError(
            f"num_beams={beams} rearranges the cache at every token, so no step can be replayed; use num_beams=1 or "
            "capture=False"
        )


@contextmanager
def session(
    press: BasePress, model: PreTrainedModel, evict: bool = True, recorder: Recorder | None = None
) -> Iterator[Session]:
    """Install `press` on `model` for the length of a `with` block; with a `recorder`, replay its decode steps."""
    current = Session(press, model, evict, recorder)
    current.enter()
    try:
        yield current
    finally:
        current.exit()


def graph_recorder(model: PreTrainedModel) -> Recorder:
    """Return what records the decode steps of a model as CUDA graphs."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise ValueError(f"capture needs a model on one device, this one is on {', '.join(devices)}; use capture=False")
    return GraphRecorder(model.device)


def adopt_layer(cache: Cache, module: nn.Module) -> PressLayer | None:
    """Return our layer of the cache for this module, put in place of a stock one; None where the layer is not ours."""
    index: int = module.layer_idx  # type: ignore[assignment]
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    if index >= len(cache.layers):
        return None
    layer = cache.layers[index]
    if isinstance(layer, PressLayer):
        return layer
    if "Static" in type(layer).__name__:
        raise NotImplementedError(
            f"{type(layer).__name__} has a fixed size and cannot be compressed; use the default dynamic cache"
        )
    if type(layer) is not DynamicLayer:
        return None
    ours = PressLayer()
    if layer.is_initialized and layer.get_seq_length():
        ours.update(layer.keys, layer.values)
    cache.layers[index] = ours
    return ours


def is_attention(module: nn.Module) -> bool:
    """Whether a module is a decoder self-attention that writes a cache layer."""
    return (
        isinstance(getattr(module, "layer_idx", None), int)
        and "Attention" in type(module).__name__
        and hasattr(module, "config")
    )


def growing_layers(model: PreTrainedModel) -> list[int]:
    """Return which attention layers, counted among attention layers only, have a cache that grows with the context."""
    kinds = layer_types(model.config.get_text_config(decoder=True))
    modules = [module for module in model.modules() if is_attention(module)]
    return [i for i, module in enumerate(modules) if kinds[module.layer_idx] == "full_attention"]


def find_rotate(module: nn.Module) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """Return the model's own rotary function as `(vectors, cos, sin) -> vectors`, whatever its layout of channels."""
    own = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if own is None:
        return None
    if list(inspect.signature(own).parameters)[:4] == ["q", "k", "cos", "sin"]:
        return lambda vectors, cos, sin: own(vectors, vectors, cos, sin)[0]
    if list(inspect.signature(own).parameters)[1:3] == ["cos", "sin"]:
        return lambda vectors, cos, sin: own(vectors, cos, sin)
    return None


def find_rotary(module: nn.Module, decoder: nn.Module) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None:
    """Return `(like, positions [B, n]) -> (cos, sin)` of this layer, from the model's own embedding."""
    embedding = getattr(decoder, "rotary_emb", None)
    if embedding is None:
        return None
    extra = {}
    if "layer_type" in inspect.signature(embedding.forward).parameters:
        extra["layer_type"] = getattr(module, "layer_type", None)
    return partial(embedding, **extra)


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Return the empty cache that `generate` would make for this model."""
    return DynamicCache(config=model.config)


def layer_types(text_config: Any) -> list[str]:
    """Kind of every cache layer of a decoder: `full_attention`, `sliding_attention`, ..."""
    return list(get_layer_types_and_kwargs(text_config)[0])


def load_config(name: str) -> Any:
    """Read the configuration of `reference`, a folder, a config.json file or a hub name."""
    return AutoConfig.from_pretrained(reference_path() if name == "reference" else name)


def _configs(model: PreTrainedModel) -> list[Any]:
    found = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return list(found.values())


def _restore(before: dict[int, tuple[Any, str]]) -> None:
    for config, name in before.values():
        config._attn_implementation_internal = name


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a cache layer's state, tensors that are written in place included."""

    def own(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone()
        return _copied(value) if isinstance(value, dict) else value

    return {name: own(value) for name, value in state.items()}


@lru_cache(maxsize=4)
def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a folder or hub name, once."""
    return AutoTokenizer.from_pretrained(path)


def load(path: str, **kwargs: Any) -> tuple[PreTrainedModel, Any]:
    """Load a causal language model and its tokenizer, padded on the left."""
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(path, **kwargs).eval(), tokenizer


def check_halves_rotate(model: PreTrainedModel) -> None:
    """Refuse models whose rotary embedding is not one that pairs channels i and i + d / 2 of the leading d."""
    decoder = model.get_decoder()
    for module in (m for m in model.modules() if is_attention(m)):
        rotate, rotary = find_rotate(module), find_rotary(module, decoder)
        if not getattr(module, "use_rope", True):
            continue
        name = type(module).__name__
        if rotate is None or rotary is None:
            raise NotImplementedError(
                f"{name} has no rotary embedding of its decoder that keys could be turned back by"
            )
        cos, sin = rotary(torch.zeros(1, 1, 1), torch.tensor([[7]], device=next(model.parameters()).device))
        vectors = torch.randn(1, 1, 1, module.head_dim, device=cos.device)
        pairs = [per_pair(part[0]) for part in (cos, sin)]
        fits = 2 * pairs[0].shape[-1] <= module.head_dim
        if not fits or not torch.allclose(
            rotate(vectors, cos, sin)[0, 0], turn_halves(vectors[0, 0], *pairs), atol=1e-3
        ):
            raise NotImplementedError(
                f"{name} rotates channels in another layout than halves; its keys cannot be coded"
            )
