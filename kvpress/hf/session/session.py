# SPDX-License-Identifier: Apache-2.0
"""Session of a `with press(model)` block: run the forward passes of a model under a press."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvpress.cache.attention import group_queries
from kvpress.cache.codec import JointCodec
from kvpress.cache.store import KVStore, settle_together
from kvpress.core.checks import check_finite
from kvpress.core.effect import warn_if_idle, warn_if_unread
from kvpress.core.executor import Executor
from kvpress.core.model import LayerFacts
from kvpress.core.press import BasePress, parts_of, remember
from kvpress.core.recipe import Recipe, recipe_of
from kvpress.core.spec import get_press
from kvpress.hf.attention import self_caching
from kvpress.hf.attention.native import NAME
from kvpress.hf.attention.queries import intercept, rotates
from kvpress.hf.cache.adoption import adopt_layer, check_adopted
from kvpress.hf.cache.layer import PressLayer, hold_window_alone, narrower
from kvpress.hf.generation.capture import Recorder
from kvpress.hf.generation.replay import CapturedForward, check_capture, graph_recorder
from kvpress.hf.models import CACHE, attention_modules, cache_among, cache_place, cached_layers, decoder_of, facts_of
from kvpress.hf.positions import reach, warn_past_positions
from kvpress.hf.session import token_dropping
from kvpress.hf.session.base import BaseSession, OpenBlock
from kvpress.hf.session.candidate_passes import read_in_parts
from kvpress.hf.session.checks import check_forward, check_mask_of_padded, check_model
from kvpress.hf.session.chunked_prefill import ChunkedForward
from kvpress.hf.session.compiled import original
from kvpress.hf.session.image_merging import merge_prompt
from kvpress.hf.session.installation import Installation, check_free, install
from kvpress.hf.session.layer_plan import LayerPlan
from kvpress.hf.session.requests import Forward, autocast_of, here
from kvpress.hf.session.rereading import DecoderReader
from kvpress.observe.call import AttentionLayer, LayerCall, NewTokens
from kvpress.observe.observer import Wanted
from kvpress.observe.passes import TOKENS, Pass, ReadTokens, Watch
from kvpress.observe.spans import SPANS, SpanTracker


class Session(BaseSession):
    """Configuration of one press on one model, for the length of a `with` block.

    The state of a pass is in its `Forward`; the session keeps only the last cache.

    Args:
        press: a press or its spec.
        model: the model, compiled or not.
        evict: False reads compressed caches and evicts nothing after a prompt.
        recorder: records decode steps, which are then replayed.
        private: the block serves only the thread that entered it.
        tokenizer: finds tags and roles, instead of the tokenizer in the model's folder.
    """

    def __init__(
        self,
        press: BasePress | str,
        model: PreTrainedModel,
        evict: bool = True,
        recorder: Recorder | None = None,
        private: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.press = get_press(press)
        self.tokenizer = tokenizer
        self.given, model = model, original(model)
        self.model = model
        self.evict = evict
        self.block = OpenBlock(private)
        self.recipe = Recipe()
        self.executor = Executor(self.recipe)
        self.shares_caches = False
        self.modules = attention_modules(model)
        self.layers: dict[int, LayerPlan] = {}
        self.cached = cached_layers(model, self.modules)
        self.kinds = [layer.kind for layer in self.cached]
        self.full = {i for i, layer in enumerate(self.cached) if layer.grows}
        self.lends = {cache_place(module) for module in self.modules if getattr(module, "store_full_length_kv", False)}
        self.growing = [i for i, module in enumerate(self.modules) if cache_place(module) in self.full]
        self.reads_itself = any(self_caching.reads_itself(self.modules[i]) for i in self.growing)
        self.decoder = decoder_of(model)
        self.positions: int | None = None
        self.recorder = recorder
        self.captured: CapturedForward | None = None
        self.chunked: ChunkedForward | None = None
        self._cache: Cache | None = None
        self._unsealed: dict[Any, dict[int, LayerCall]] = {}
        """Calls of a pass whose layers are encoded together with a later one, by thread and layers."""
        self._installation: Installation | None = None

    @property
    def cache(self) -> Cache | None:
        """Cache last used inside the block; of a call of `generate`, the cache of its prompt.

        Raises:
            RuntimeError: a thread that entered no block used the press while several blocks were open.
        """
        if self._cache is None and self.shares_caches:
            raise RuntimeError(
                "a thread that entered no block used the model while several blocks of this press were open, so its cache "
                "belongs to no single block; read past_key_values of generate(..., return_dict_in_generate=True)"
            )
        return self._cache

    @cache.setter
    def cache(self, cache: Cache | None) -> None:
        self._cache = cache

    @property
    def watch(self) -> Watch | None:
        """Receiver of the layer calls while this thread rereads tokens behind a cache; else None."""
        return None if here.forward is None else here.forward.watch

    def enter(self) -> None:
        """Check the model, then install the hooks. A failed check changes nothing."""
        self.press.validate()
        check_free(self)
        self.prepare()
        if self.evict:
            warn_if_idle(self.press)
            warn_if_unread(self.press, self.recipe, self.growing)
        self._installation = install(self)

    def prepare(self) -> None:
        """Check that the press supports the model, and build the plan of each layer."""
        self.press.validate()
        outline = recipe_of(self.press)
        if not check_model(self.model, outline.is_identity, self.modules):
            self.modules = []
            return
        facts = facts_of(self.model, self.modules)
        if (autocast := autocast_of(self.decoder)) is not None:
            facts = replace(facts, dtype=narrower(facts.dtype, autocast[1]))
        if self.tokenizer is not None:
            facts = replace(facts, tokenizer=lambda: self.tokenizer)
        self.positions = facts.positions
        self.press.post_init_from_model(self.model)
        self.recipe = recipe_of(self.press, facts)
        if self.reads_itself:
            self_caching.check_press(self.model, self.recipe)
        token_dropping.check_model(self, self.recipe)
        self.executor = Executor(self.recipe, self.evict)
        self.executor.check()
        if self.recorder is not None:
            check_capture(self)
        selectors = {layer: self.recipe.selector_at(layer) for layer in self.growing}
        self.layers = {}
        for layer_facts in facts.layers:
            attention_layer = self._attention_layer(layer_facts)
            selector = selectors.get(layer_facts.index)
            self.layers[id(attention_layer.module)] = LayerPlan(self.recipe, layer_facts, attention_layer, selector)
        for layer, later in itertools.pairwise(self.growing):
            later_selector = selectors[later]
            if later_selector is not None and later_selector.looks_ahead:
                self.layers[id(self.modules[layer])].following = self.layers[id(self.modules[later])]

    def _attention_layer(self, facts: LayerFacts) -> AttentionLayer:
        module = facts.module
        assert module is not None  # noqa: S101 - layers of a session are those of a model
        return AttentionLayer(
            module=module,
            index=facts.index,
            count=len(self.modules),
            depth=sum(layer < facts.index for layer in self.growing),
            depths=len(self.growing),
            cache_index=cache_place(module),
            rotates=not self.reads_itself,
            apply_rotary=facts.rotate,
            rotary_angles=facts.angles,
            expand=self_caching.expanded(module),
            reads_itself=self.reads_itself,
            merged_heads=facts.merged_heads,
            shards=facts.shards,
        )

    @property
    def replaces_forward(self) -> bool:
        """Whether the model's `forward` is replaced, for capture or chunked prefill."""
        return self.recorder is not None or self.executor.chunk is not None

    def replace_forward(self, forward: Callable[..., Any]) -> None:
        """Wrap the model's `forward` to replay decode steps and to read prompts in chunks."""
        if self.recorder is not None:
            self.captured = CapturedForward(self, forward, self.recorder)
        if self.executor.chunk is not None:
            as_turns = self.recipe.chunks_are_turns
            self.chunked = ChunkedForward(self, self.captured or forward, self.executor.chunk, as_turns)

    def exit(self) -> None:
        """Leave the block. Calls that run in other threads finish under the press."""
        if self._installation is not None:
            self._installation.close(self)
            self._installation = None
        if self.captured is not None:
            self.captured.forget()
        if self._cache is not None:
            remember(self.press, self._cache)
        for press in parts_of(self.press):
            press.after_block()

    # -- passes ----------------------------------------------------------------------------------------------

    def run(self, forward: Forward, decode: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the decoder as one pass, or as several where draft tokens must be read in parts."""
        output = None
        if forward.watch is None and forward.static is None:
            output = read_in_parts(self, forward, decode, args, kwargs)
        return self.run_whole(forward, decode, args, kwargs) if output is None else output

    def run_whole(
        self, forward: Forward, decode: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the decoder as one pass."""
        forward.modules_left = len(self.modules)
        forward.autocast = autocast_of(self.decoder)
        outer, here.forward = here.forward, forward
        try:
            self.check(forward, args, kwargs)
            forward.note(args, kwargs)
            output = token_dropping.whole_output(forward, decode(*args, **merge_prompt(self, forward, kwargs)))
            with forward.with_autocast(False):
                self._pass_over(forward, args, kwargs)
        except BaseException:
            forward.fail()
            raise
        finally:
            here.forward = outer
            forward.end()
        return output

    def check(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a pass that this session cannot run."""
        if not self.reads_itself and self.decoder.config._attn_implementation != NAME:
            raise RuntimeError(
                f"the attention implementation was set to {self.decoder.config._attn_implementation!r} inside the block of a "
                "press, which needs its own; set it before the block is entered"
            )
        if forward.watch is None:
            until = forward.prompt_length(cache_among((*kwargs.values(), *args))) if self.evict else None
            has_ids = forward.ids_among(args, kwargs) is not None
            tokens = check_forward(self.recipe, args, kwargs, self.model.config, until, self.cached, has_ids)
            if forward.static is None:
                check_mask_of_padded(args, kwargs, tokens)
            self.note_length(self.recipe, tokens, kwargs)
            token_dropping.check_pass(self, forward, args, kwargs)

    def note_length(self, recipe: Recipe, tokens: int, kwargs: dict[str, Any]) -> None:
        """Warn once for a model if a pass makes the cache longer than the model has positions."""
        limit = self.positions
        if limit is not None and tokens > limit and reach(self.model.config, recipe, tokens) > limit:
            warn_past_positions(self.model, limit, tokens, kwargs)

    def before(self, forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adopt the cache layer of an attention module, and set up the `LayerCall` of its forward pass."""
        plan = self.layers.get(id(module))
        if plan is None:
            return  # the module belongs to another model
        read = forward.cache is not None and kwargs.get(CACHE) is forward.cache
        cache = forward.cache if read else cache_among((*kwargs.values(), *args))
        forward.release()
        if cache is None:
            return
        if forward.cache is None:
            forward.begin(cache)
        index = plan.layer.cache_index
        if index not in self.full:
            return
        layer = adopt_layer(cache, index, plan.layer)
        if layer is None:
            if not self.recipe.is_identity:
                check_adopted(cache.layers[index], index)
            return
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        length = hidden.shape[1] if hidden is not None else 1
        if forward.request is not None and forward.request.takes_back and forward.request.is_of(cache):
            layer.record_past = True
        layer.static, layer.read_only = forward.static is not None, forward.differentiable or forward.parts > 0
        seen_before = layer.get_seq_length() - (length if layer.static else 0)
        candidates = layer.record_past and seen_before > 0
        call = LayerCall(
            plan.layer,
            forward.new_tokens(seen_before, candidates) or self._new_tokens(forward, cache, seen_before, candidates),
            store=layer.store,  # type: ignore[arg-type]
            kwargs={**kwargs, "past_key_values": cache},
            hidden_states=hidden,  # type: ignore[arg-type]
        )
        if plan.rotates is None:
            plan.rotates = plan.layer.rotates = rotates(module, call)
        call.count(length)
        layer.call = forward.call = call
        if plan.following is not None and call.phase == "decode" and length == 1 and forward.watch is None:
            _prefetch(plan.following, call)

    def _new_tokens(self, forward: Forward, cache: Cache, seen_before: int, candidates: bool) -> NewTokens:
        """Return the new tokens of a pass, which later layers of the pass share where nothing drops tokens."""
        prompt_end = forward.prompt_end(cache)
        tokens = NewTokens(
            seen_before=seen_before,
            mask=forward.mask,
            prompt_start=forward.request.prompt_start if prompt_end and forward.request is not None else seen_before,
            prompt_end=prompt_end,
            around_chunk=forward.around_chunk(cache),
            chunk=None if self.recipe.chunks_are_turns else self.executor.chunk,
            candidates=candidates,
            copies=forward.copies(cache),
            ids=forward.ids,
            axes=forward.axes,
            cells=forward.cells,
            tracker=partial(self.tracker, cache) if self.recipe.reads_tokens else None,
            rules=self.recipe.observed_rules,
            shared=cache.__dict__.setdefault("_kvpress_shared", {}),
        )
        if self.recipe.dropping is None and forward.static is None:
            forward.tokens = tokens
        return tokens

    def tracker(self, cache: Cache) -> SpanTracker:
        """Return the span tracker of a cache, which is an observer of its first growing layer."""
        tracker: SpanTracker = cache.layers[cache_place(self.modules[self.growing[0]])].store.observers[SPANS]
        return tracker

    def observe(self, call: LayerCall) -> None:
        """Run the observers that a later step of the press needs; their state keeps no graph of the pass."""
        watched = self.executor.watched[call.phase]
        wanted = (*watched, *self._aids(call))
        if not wanted:
            return
        if any(not observation.by_token for observation in watched):
            call.keep_store(call.tokens.seen_before)
        with torch.no_grad():
            for observation in wanted:
                if observation not in call.store.observers:
                    call.store.observers[observation] = observation.make()
                call.store.observers[observation].observe(call)

    def _aids(self, call: LayerCall) -> tuple[Wanted, ...]:
        """Return the observers of a prompt's queries that the codec of a layer rounds better with.

        None without a codec, and where the queries of the whole prompt cannot be watched.
        """
        watches = call.phase == "prefill" and self.evict and not self.reads_itself and self.recipe.dropping is None
        codec = self.layers[id(call.layer.module)].codec
        return codec.aids if watches and codec is not None else ()

    @property
    def follows(self) -> bool:
        """Whether the press acts on all layers together at the end of a pass."""
        return self.executor.follows("prefill") or self.executor.follows("decode")

    def after(self, forward: Forward, module: nn.Module, output: Any) -> Any:
        """Finish the call of an attention module, and return its output, which a user's hook may have replaced."""
        if id(module) not in self.layers:
            return output
        with forward.with_autocast(False):
            output = self._after(forward, module, output)
        forward.modules_left -= 1
        return output

    def _after(self, forward: Forward, module: nn.Module, output: Any) -> Any:
        call = forward.release()
        if call is None:
            if forward.cache is not None and forward.watch is None:
                hold_window_alone(forward.cache.layers[cache_place(module)])
            return output
        call.output = output
        if self.reads_itself:
            self_caching.note(forward, call)
        if forward.static is not None:
            forward.static.calls.append(call)
        elif forward.watch is not None:
            forward.watch(call)
        elif call.layer.cache_index in self.lends and call.store is not None:
            forward.lent.append(call)  # later layers of this pass still read its pairs
        elif self.recipe.dropping is None:
            self._finish_layer(forward, call)
        else:
            token_dropping.after_layer(self, forward, call)
            self._finish_layer(forward, call)
            token_dropping.cut_back(self, forward, call)
        return call.output

    def _finish_layer(self, forward: Forward, call: LayerCall) -> None:
        """Evict and encode in a layer that no later module of this pass reads."""
        self.follow(call)
        # Where only prompts are evicted from at the end of a pass, one call suffices to record the ids of other passes.
        if self.follows and (call.layer.depth == 0 or self.executor.follows(call.phase)):
            forward.passed.append(call.without_tensors())

    def follow(self, call: LayerCall) -> None:
        """Evict and encode after the attention of a layer."""
        store = call.store
        if store is None or call.queries.dim() < 4:
            return
        if store.seen < call.tokens.prompt_end:
            self.executor.after_chunk(call)
            return
        self.executor.after_layer(call)
        if self.executor.follows(call.phase):
            return
        plan = self.layers[id(call.layer.module)]
        if call.phase == "prefill" or (plan.codec is not None and store.is_due(plan.codec)):
            self._seal(call)
        elif plan.selector is not None:
            plan.selector.prepare(store)

    def _seal(self, call: LayerCall) -> None:
        """Drop observations that only this eviction needed, and encode full tiles of the kept pairs.

        A layer that is encoded together with others waits for the last of them.
        """
        calls = self._sealed_together(call)
        held = [*self.recipe.held_observers, *((TOKENS,) if self.follows else ())]
        read = call.phase == "prefill"
        for call in calls if read and self.evict else ():
            call.store.forget([*held, *self._aids(call)])
        self._settle(calls, read)
        for call in calls:
            store, plan = call.store, self.layers[id(call.layer.module)]
            if plan.codec is not None:
                if read and self.evict:
                    store.forget(held)
                if call.is_first_prompt:
                    store.fix()
            if call.tokens.copies > 1 and call.is_first_prompt:
                store.hold_in_common(call.tokens.copies, call.tokens.mask)
            if plan.selector is not None:
                plan.selector.prepare(store)

    def _sealed_together(self, call: LayerCall) -> list[LayerCall]:
        """Return the calls of the layers that are encoded now, in order: none if a later layer is encoded with this one."""
        codec = self.layers[id(call.layer.module)].codec
        if not isinstance(codec, JointCodec):
            return [call]
        key = threading.get_ident(), codec.layers
        calls = {
            index: waiting
            for index, waiting in self._unsealed.pop(key, {}).items()  # those of a pass that failed are left out
            if waiting.tokens.shared is call.tokens.shared and waiting.store.seen == call.store.seen
        }
        calls[call.layer.index] = call if len(calls) == len(codec.layers) - 1 else call.without_tensors()
        if len(calls) < len(codec.layers):
            self._unsealed[key] = calls
            return []
        return [calls[index] for index in codec.layers]

    def _settle(self, calls: list[LayerCall], read: bool) -> None:
        """Encode full tiles of one layer, or of layers that are encoded together; `read` after a prompt or turn."""
        codecs = [codec for call in calls if (codec := self.layers[id(call.layer.module)].codec) is not None]
        if not codecs:
            return
        for call in calls if read else ():
            check_finite(call.store.window.filled_keys, call.store.window.filled_values, call.layer.index)
        if read or any(call.store.is_due(codec) for call, codec in zip(calls, codecs, strict=True)):
            settings = {"wait": not read, "turn": read and self.evict}
            if len(calls) == 1:
                calls[0].store.settle(codecs[0], calls[0].sealing, **settings)
            else:
                stores, sealings = [call.store for call in calls], [call.sealing for call in calls]
                settle_together(stores, codecs, sealings, **settings)

    def prepare_reading(self, module: nn.Module, store: KVStore) -> None:
        """Build the selector's index of the pairs that a layer stores."""
        selector = self.layers[id(module)].selector
        if selector is not None:
            selector.prepare(store)

    def _pass_over(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for call in forward.lent:
            self._finish_layer(forward, call)
        forward.lent = []
        forward.passed.sort(key=lambda call: call.layer.depth)
        calls, forward.passed = [call for call in forward.passed if call.store is not None], []
        if calls:
            self.finish(
                forward.cache, calls, kwargs.get("input_ids", args[0] if args else None), kwargs.get("position_ids")
            )

    def finish(self, cache: Cache, calls: list[LayerCall], ids: Tensor | None, positions: Tensor | None) -> None:
        """Record the ids of a pass, then evict across layers if the press does so at the end of such passes."""
        store, phase = calls[0].store, calls[0].phase
        if TOKENS not in store.observers:
            store.observers[TOKENS] = ReadTokens()
        tokens: ReadTokens = store.observers[TOKENS]
        tokens.add(ids, calls[0].tokens.seen_before, store.seen - calls[0].tokens.seen_before)
        if store.seen < calls[0].tokens.prompt_end:
            return
        if self.executor.follows(phase):
            position = (
                torch.full((1, 1), store.seen - 1, device=store.window.keys.device) if positions is None else positions
            )
            self.executor.after_pass(Pass(cache, calls, tokens.ids, position[..., -1:] + 1, DecoderReader(self)))
            for call in calls:
                self._seal(call)
        if phase == "prefill":
            tokens.forget()


@contextmanager
def session(
    press: BasePress | str,
    model: PreTrainedModel,
    evict: bool = True,
    recorder: Recorder | None = None,
    private: bool = False,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Iterator[Session]:
    """Install `press` on `model` for the length of a `with` block; see `Session`."""
    current = Session(press, model, evict, recorder, private, tokenizer)
    current.enter()
    try:
        yield current
    finally:
        current.exit()


@contextmanager
def reading(model: Any, press: BasePress | str | None = None, capture: bool = False) -> Iterator[Session]:
    """Read compressed caches inside the block without evicting from the tokens that are read.

    With a `press`, or its spec, its codec, its selector and its decoding schedule still run; only the eviction after a
    prompt is left out. Use it to answer questions about a context that was compressed before. `capture=True` replays
    decode steps, as `press(model, capture=True)` does.
    """
    recorder = graph_recorder(model) if capture else None
    with session(BasePress() if press is None else press, model, evict=False, recorder=recorder) as current:
        yield current


def _prefetch(following: LayerPlan, call: LayerCall) -> None:
    """Prefetch pairs for the selector of the following layer, with queries computed from the input of this one."""
    layer = call.cache.layers[following.layer.cache_index]
    if following.selector is not None and isinstance(layer, PressLayer) and layer.store is not None:
        queries = intercept(following.module, call.hidden_states, call.kwargs).queries
        following.selector.prefetch(layer.store, group_queries(queries, layer.store.heads))
