"""The session: installs a press on a model for the length of a `with` block, and restores the model."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from kvpress.cache.attention import group_queries
from kvpress.cache.store import Reader
from kvpress.core.checks import check_finite
from kvpress.core.executor import Executor
from kvpress.core.model import LayerFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.selector import Selector
from kvpress.hf.attention import CALL, NAME, queries_of, register, sessions
from kvpress.hf.capture import Recorder
from kvpress.hf.checks import check_forward, check_generate, check_model
from kvpress.hf.layer import PressLayer, adopt_layer
from kvpress.hf.models import config_layers, facts_of, is_attention
from kvpress.hf.replay import CapturedForward, StaticPass, check_capture, check_captured_generate, graph_recorder
from kvpress.hf.rereading import DecoderReader
from kvpress.observe.call import LayerCall, Phase
from kvpress.observe.passes import TOKENS, Pass, ReadTokens, Watch


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
        self.recipe = Recipe()
        self.executor = Executor(self.recipe)
        self.cache: Cache | None = None
        self.prefill_until = 0
        self.passed: list[LayerCall] = []
        self.watch: Watch | None = None
        self.native_name = model.config._attn_implementation
        self.modules = [m for m in model.modules() if is_attention(m)]
        self.layers: dict[int, LayerPlan] = {}
        text = model.config.get_text_config(decoder=True)
        self.cached = config_layers(text) if self.modules else []
        self.kinds = [layer.kind for layer in self.cached]
        self.full = {i for i, kind in enumerate(self.kinds) if kind == "full_attention"}
        self.growing = [i for i, module in enumerate(self.modules) if module.layer_idx in self.full]
        self.decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
        self.captured = None if recorder is None else CapturedForward(self, model.forward, recorder)
        self._undo: list[Callable[[], Any]] = []

    @property
    def static(self) -> StaticPass | None:
        """The static pass under way, if any."""
        return None if self.captured is None else self.captured.under_way

    def enter(self) -> None:
        """Check the model, then install; nothing is changed if a check fails."""
        self.prepare()
        try:
            self._install()
        except BaseException:
            self.exit()
            raise

    def prepare(self) -> None:
        """Check press and model against each other, and work out what every layer does."""
        self.press.validate()
        outline = self.press.recipe()
        check_model(self.model, outline.is_identity, bool(self.modules), bool(self.full))
        facts = facts_of(self.model)
        self.press.post_init_from_model(self.model)
        self.recipe = self.press.recipe(facts)
        self.executor = Executor(self.recipe, self.evict)
        self.executor.check()
        if self.captured is not None:
            check_capture(self)
        selectors = {layer: self.recipe.selector_at(layer) for layer in self.growing}
        self.layers = {}
        for known in facts.layers:
            self.layers[id(known.module)] = LayerPlan(self, known, selectors.get(known.index))
        for layer, later in itertools.pairwise(self.growing):
            looking = selectors[later]
            if looking is not None and looking.looks_ahead:
                self.layers[id(self.modules[layer])].following = self.modules[later]

    def _install(self) -> None:
        register()
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
            sessions[key] = self
            self._undo.append(partial(sessions.pop, key, None))
        rotary = getattr(self.decoder, "rotary_emb", None)
        for module in self.modules:
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
            until = self.prefill_until if self.evict else None
            check_forward(self.recipe, args, kwargs, self.model.config, until, self.cached)

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
            layer=plan.facts.index,
            layers=len(self.modules),
            prompt_end=self.prefill_until,
            depth=plan.depth,
            depths=len(self.growing),
            kwargs=kwargs,
            hidden_states=hidden,  # type: ignore[arg-type]
            seen_before=layer.get_seq_length() - (length if layer.static else 0),
            apply_rotary=plan.facts.rotate,
            rotary_angles=None if plan.facts.angles is None or hidden is None else partial(plan.facts.angles, hidden),
            shared=cache.__dict__.setdefault("_kvpress_shared", {}),
        )
        call.phase = self._phase(call.seen_before, length)
        layer.call = call
        module.__dict__[CALL] = call
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
        """Let observers see a pass, where something later needs it."""
        for wanted in self.executor.watched[call.phase]:
            if wanted not in call.store.observers:
                call.store.observers[wanted] = wanted.make()
            call.store.observers[wanted].observe(call)

    @property
    def follows(self) -> bool:
        """Whether something happens at the end of passes."""
        return self.executor.follows("prefill") or self.executor.follows("decode")

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
        """Evict, and let the codec encode, once a layer's pass is over."""
        store = call.store
        if store is None or call.queries.numel() == 0 or store.seen < self.prefill_until:
            return
        self.executor.after_layer(call)
        if not self.executor.follows(call.phase):
            self._seal(call)

    def _seal(self, call: LayerCall) -> None:
        """Drop what only this pass's eviction needed and encode what is ready, once a layer holds what it will keep."""
        store, plan = call.store, self.layers[id(call.module)]
        if call.phase == "prefill" and self.evict:
            store.forget([*self.executor.watched["decode"], *((TOKENS,) if self.follows else ())])
        if plan.codec is not None:
            if call.phase == "prefill":
                check_finite(store.window.filled_keys, store.window.filled_values, call.layer)
            store.settle(plan.codec, call.sealing, wait=call.phase == "decode")
        if plan.selector is not None:
            plan.selector.prepare(store)

    def _kept_of(self, call: LayerCall) -> LayerCall:
        """Return a call without the tensors of its pass: those of all layers together would outweigh the cache."""
        angles, empty = self.layers[id(call.module)].facts.angles, call.queries.new_zeros(1, 1, 1)
        return replace(
            call,
            kwargs={},
            hidden_states=empty[:, :0],
            queries=call.queries.new_empty(*call.queries.shape[:2], 0, call.queries.shape[3]),
            lse=None,
            attentions=None,
            read=None,
            rotary_angles=None if angles is None else partial(angles, empty),
        )

    def _pass_over(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        del module, output
        calls, self.passed = [call for call in self.passed if call.store is not None], []
        if calls:
            self.finish(calls, kwargs.get("input_ids", args[0] if args else None), kwargs.get("position_ids"))

    def finish(self, calls: list[LayerCall], ids: Tensor | None, positions: Tensor | None) -> None:
        """Remember what a pass read, and let the press act on all layers together where it follows such passes."""
        store, phase = calls[0].store, calls[0].phase
        if TOKENS not in store.observers:
            store.observers[TOKENS] = ReadTokens()
        tokens: ReadTokens = store.observers[TOKENS]
        tokens.add(ids, calls[0].seen_before, store.seen - calls[0].seen_before)
        if store.seen < self.prefill_until:
            return
        if self.executor.follows(phase):
            position = (
                torch.full((1, 1), store.seen - 1, device=store.window.keys.device) if positions is None else positions
            )
            self.executor.after_pass(Pass(self.cache, calls, tokens.ids, position[..., -1:] + 1, DecoderReader(self)))
            for call in calls:
                self._seal(call)
        if phase == "prefill":
            tokens.forget()

    def _release(self, module: nn.Module) -> LayerCall | None:
        """Take the call off a module and its cache layer, so that neither keeps the other alive."""
        call: LayerCall | None = module.__dict__.pop(CALL, None)
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

    def __init__(self, session: Session, facts: LayerFacts, selector: Selector | None) -> None:
        self.facts = facts
        self.depth = sum(layer < facts.index for layer in session.growing)
        self.codec = session.recipe.codec_at(facts.index)
        self.selector = selector
        self.pattern = None if session.recipe.pattern is None else session.recipe.pattern(facts.index)
        self.following: nn.Module | None = None

    def reader(self, call: LayerCall) -> Reader | None:
        """Return what a decode step reads sealed pairs with; None reads them all."""
        return None if self.selector is None else partial(self.selector.attend, call)


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


@contextmanager
def reading(model: Any, press: BasePress | None = None, capture: bool = False) -> Iterator[Session]:
    """Read compressed caches inside the block without evicting from the tokens that are read.

    With `press`, its codec still encodes older tokens, its selector still chooses what decoding reads and a decoding
    schedule still runs; only the eviction after a prompt is left out. This is how questions are asked about a context
    that was compressed before they were known. `capture` is that of `press(model, capture=True)`: decode steps are replayed.
    """
    recorder = graph_recorder(model) if capture else None
    with session(BasePress() if press is None else press, model, evict=False, recorder=recorder) as current:
        yield current


def _configs(model: PreTrainedModel) -> list[Any]:
    found = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return list(found.values())


def _restore(before: dict[int, tuple[Any, str]]) -> None:
    for config, name in before.values():
        config._attn_implementation_internal = name
