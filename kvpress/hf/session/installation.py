# SPDX-License-Identifier: Apache-2.0
"""Hooks on a model, shared by all open blocks, and the choice of the block that serves a call.

A block serves the thread, or asynchronous task, that entered it. A thread that entered no block, such as one that generates
for a streamer, is served if all open blocks have the same press. Blocks of different presses may be open in different threads,
but never inside each other. A request that began inside a block ends under its press, even if the block was left meanwhile:
the model is restored after the request.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationMixin
from transformers.modeling_utils import PreTrainedModel

from kvpress.core.press import BasePress
from kvpress.hf.attention.functions import register
from kvpress.hf.attention.native import NAME, PressName
from kvpress.hf.attention.self_caching import attend
from kvpress.hf.cache.layer import stop_recording
from kvpress.hf.generation.replay import check_captured_generate
from kvpress.hf.grids import cells_in, grids_among
from kvpress.hf.models import cache_among, embedder_of
from kvpress.hf.session.base import BaseSession
from kvpress.hf.session.checks import check_generate, check_weights, copies_of, is_assistant, setting, takes_back
from kvpress.hf.session.compiled import run_eagerly
from kvpress.hf.session.hooks import Hook, Replaced
from kvpress.hf.session.requests import Forward, Request, here
from kvpress.hf.session.token_dropping import decoder_layers, hand_on

_changes = threading.RLock()
_installed: dict[int, Installation] = {}
"""Installations by the id of each switched configuration (configurations are not hashable)."""
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


def check_free(session: BaseSession) -> None:
    """Refuse a block inside the block of another press, or on a model that shares its configuration with another.

    Raises:
        RuntimeError: this thread is in a block of another press, or a block is open on a model with the same config object.
    """
    with _changes:
        installation = _installed.get(id(session.model.config))
        if installation is None:
            return
        if installation.model is not session.model:
            raise RuntimeError(
                "a press is already active on another model that shares its configuration object with this one: leave its "
                "block first, or give one of them a configuration of its own (copy.deepcopy(config))"
            )
        for open_session in installation.sessions:
            if open_session.block.is_ours and not _alike(open_session, session):
                raise RuntimeError(
                    f"{_shown(open_session)} is already active on this model in this thread, so {_shown(session)} cannot be: "
                    "compose presses instead of nesting them, `press_a + press_b`; to use one after the other, leave the "
                    "first block before"
                )


def install(session: BaseSession) -> Installation:
    """Open a block on its model, and return the installation that serves it."""
    with _changes:
        check_free(session)
        installation = _installed.get(id(session.model.config)) or Installation(session)
        installation.open(session)
        return installation


def is_inside_block(model: Any) -> bool:
    """Whether this thread has entered a block that is open on a model."""
    with _changes:
        installation = _installed.get(id(model.config))
        return installation is not None and any(session.block.is_ours for session in installation.sessions)


def _shown(session: BaseSession) -> str:
    text = repr(session.press)
    return (text if len(text) <= 120 else f"{text[:117]}...") + ("" if session.evict else " (reading)")


def _alike(first: BaseSession, second: BaseSession) -> bool:
    """Whether two sessions have the same effect on every cache."""
    return (
        first.evict == second.evict
        and (first.recorder is None) == (second.recorder is None)
        and not first.block.private
        and not second.block.private
        and same(first.press, second.press)
    )


def same(first: Any, second: Any) -> bool:
    """Whether two settings are equal; compares presses and tensors by value."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return first.shape == second.shape and first.device == second.device and bool((first == second).all())
    if isinstance(first, BasePress):
        first_settings, second_settings = (
            {n: v for n, v in vars(press).items() if n != "_last_cache"} for press in (first, second)
        )
        return same(first_settings, second_settings)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(value, second[name]) for name, value in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    try:
        return bool(first == second)
    except (TypeError, ValueError, RuntimeError):
        return False


class Installation:
    """Hooks and replaced methods of one model, and the sessions of the blocks that are open on it."""

    def __init__(self, session: BaseSession) -> None:
        self.model: PreTrainedModel = session.model
        self.decoder: nn.Module = session.decoder
        self.modules = session.modules
        self.sessions: list[BaseSession] = []
        self.running = 0
        """Calls that run now, in any thread; the hooks stay until they end."""
        self.forward: Replaced | None = None
        self.hands_on = False
        self._was_open_to_all = False
        self._undo: list[Callable[[], Any]] = []
        self._undo_generate: Callable[[], Any] | None = None

    # -- blocks ----------------------------------------------------------------------------------------------

    def open(self, session: BaseSession) -> None:
        """Add a block, and install the hooks that it needs and the model lacks."""
        try:
            if not self._undo:
                self._install(session)
            self._undo.append(run_eagerly([session.given]))
            if self._undo_generate is None and hasattr(self.model, "generate"):
                self._undo_generate = Replaced(self.model, "generate", self._generate).put()
            if session.recipe.dropping is not None and not self.hands_on:
                self.hands_on = True
                for layer in decoder_layers(self.model, self.modules):
                    self._undo.append(layer.register_forward_pre_hook(Hook(hand_on), with_kwargs=True).remove)
            if session.replaces_forward:
                if self.forward is None:
                    self.forward = Replaced(self.model, "forward", self._run_model)
                    self._undo.append(self.forward.put())
                session.replace_forward(self.forward.before)
            twin = next((candidate for candidate in self.sessions if _alike(candidate, session)), session)
            session.block.group = twin.block.group
            self.sessions.append(session)
            self._was_open_to_all |= not session.block.private
            session.block.enter()
        except BaseException:
            self._restore()
            raise

    def close(self, session: BaseSession) -> None:
        """Remove a block. After the last block, the model is restored as soon as no call runs."""
        with _changes:
            session.block.leave()
            self.sessions.remove(session)
            self._restore()

    def _install(self, session: BaseSession) -> None:
        if not self.modules:
            return  # an identity press on a model without a compressible cache
        register()
        self._undo.append(run_eagerly(self.model.modules()))
        configs = {id(m.config): m.config for m in self.model.modules() if hasattr(m, "config")}
        before = {key: config._attn_implementation for key, config in configs.items()}
        self._undo.append(Replaced(self.decoder, "forward", self._decode).put())
        if session.reads_itself:
            self._undo += [Replaced(module, "forward", attend).put() for module in self.modules]
        embedder = embedder_of(self.model, self.decoder)
        if embedder is not None:
            handles = [
                embedder.register_forward_pre_hook(Hook(_note_ids), with_kwargs=True),
                embedder.register_forward_hook(Hook(_forget_ids), always_call=True),
            ]
            self._undo += [handle.remove for handle in handles]
        rotary = getattr(self.decoder, "rotary_emb", None)
        for module in self.modules:
            handles = [
                module.register_forward_pre_hook(Hook(_before), with_kwargs=True),
                module.register_forward_hook(Hook(_after), with_kwargs=True),
            ]
            self._undo += [handle.remove for handle in handles]
            if rotary is not None and not hasattr(module, "rotary_emb"):
                # Presses written for NVIDIA kvpress read `module.rotary_emb`.
                module.__dict__["rotary_emb"] = rotary
                self._undo.append(partial(module.__dict__.pop, "rotary_emb", None))
        if session.reads_itself:
            _installed.update(dict.fromkeys(configs, self))
            self._undo += [partial(_installed.pop, key, None) for key in configs]
            return
        self._undo += [partial(_name, config, before[key]) for key, config in configs.items()]
        self.model.set_attn_implementation(PressName(self.model.config._attn_implementation))
        for key, config in configs.items():
            if config._attn_implementation == NAME:
                _name(config, PressName(before[key]))
                _installed[key] = self
                self._undo.append(partial(_installed.pop, key, None))
        for module in self.modules:
            if id(module.config) not in _installed:
                raise NotImplementedError(
                    f"{type(module).__name__} ignores the attention function `{NAME}`: this model does not use "
                    "the attention interface of transformers"
                )

    def _restore(self) -> None:
        """Undo the installation, newest change first, once no block is open and no call runs."""
        if self.sessions:
            return
        if self._undo_generate is not None:
            self._undo_generate()
            self._undo_generate = None
        if not self.running:
            while self._undo:
                self._undo.pop()()
            self.forward, self.hands_on = None, False

    # -- calls -----------------------------------------------------------------------------------------------

    def _begin(self) -> tuple[BaseSession | None, bool]:
        """Count a call; return its session, and whether the session's block owns the cache of the call.

        Raises:
            RuntimeError: this thread has entered no block, and the open blocks have different presses.
        """
        with _changes:
            session, owns_cache = self._serving()
            self.running += 1
            return session, owns_cache

    def _serving(self) -> tuple[BaseSession | None, bool]:
        """Return the innermost block that this thread has entered, else a public one; public blocks must have equal presses."""
        entered = [session for session in self.sessions if session.block.is_ours]
        if entered:
            return entered[-1], True
        public = [session for session in self.sessions if not session.block.private]
        if not public or _generates(self.model):
            return None, False
        groups = {session.block.group: session for session in public}
        if len(groups) > 1:
            presses = " and ".join(map(_shown, groups.values()))
            raise RuntimeError(
                f"this thread has entered no block, and the open blocks have different presses: {presses}. "
                "Enter the block in the thread that uses the model, or start the thread with the context of the block: "
                "Thread(target=contextvars.copy_context().run, args=(model.generate, ids), kwargs=...)"
            )
        for session in public if len(public) > 1 else ():
            session.shares_caches = True
        return public[-1], len(public) == 1

    def _end(self) -> None:
        with _changes:
            self.running -= 1
            self._restore()

    def _request(self) -> Request | None:
        """Return the call of `generate` on this model that runs in this thread, if any.

        A call without a press, which other threads' blocks let through, does not serve a block that was entered since: a
        decoding loop such as `speculate` opens blocks inside `generate`.
        """
        request = here.request
        if request is None or request.model is not self.model:
            return None
        if request.session is not None:
            return request
        with _changes:
            return None if any(session.block.is_ours for session in self.sessions) else request

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        session, owns_cache = self._begin()
        outer, here.request = here.request, Request(self.model, session, owns_cache)
        try:
            if session is not None:
                cache = cache_among(kwargs.values())
                if cache is not None:
                    here.request.cache, here.request.prompt_start = cache, int(cache.get_seq_length())
                here.request.prompt_end = check_generate(self.model, *args, **kwargs)
                generation_config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
                if setting("output_attentions", kwargs, (generation_config, self.model.generation_config)):
                    check_weights(session.recipe, self.model.config, kwargs.get("attention_mask"), later=True)
                here.request.copies = copies_of(self.model, generation_config, kwargs)
                here.request.takes_back = takes_back(self.model, generation_config, kwargs)
                here.request.grids = grids_among(kwargs)
                if here.request.takes_back:
                    here.request.prompt = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
                if session.captured is not None:
                    check_captured_generate(self.model, *args, **kwargs)
                if here.request.takes_back and not is_assistant(generation_config):
                    return _recording(here.request, lambda: generate(*args, **kwargs))
            elif not self.sessions and self._was_open_to_all:
                raise RuntimeError(
                    "this `generate` was read from the model inside a `with press(model):` block that has ended; keep the "
                    "block open until the generating thread is done (thread.join())"
                )
            return generate(*args, **kwargs)
        finally:
            here.request = outer
            if session is not None and session.captured is not None:
                session.captured.forget()
            self._end()

    def _run_model(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the whole model as one request; a session may replay it or read the prompt in chunks."""
        request = self._request()
        if request is not None:
            return _stand_in(request.session, forward)(*args, **kwargs)
        session, owns_cache = self._begin()
        outer, here.request = here.request, Request(self.model, session, owns_cache)
        try:
            return _stand_in(session, forward)(*args, **kwargs)
        finally:
            here.request = outer
            self._end()

    def _decode(self, decode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the decoder as a pass of the session that serves this call; without one, run it unchanged."""
        prepared, request = here.prepared, self._request()
        if prepared is not None and prepared.session.decoder is self.decoder:
            here.prepared = None
            return prepared.session.run(prepared, decode, args, kwargs)
        if request is not None:
            return _run(Forward.of(request.session, request, request.owns_cache), decode, args, kwargs)
        session, owns_cache = self._begin()
        try:
            return _run(Forward.of(session, None, owns_cache), decode, args, kwargs)
        finally:
            self._end()


def _recording(request: Request, generate: Callable[[], Any]) -> Any:
    """Generate on a cache that records its changes; afterwards, stop the recording that this call began."""
    cache = request.cache
    recorded = {id(layer) for layer in getattr(cache, "layers", ()) if getattr(layer, "record_past", False)}
    try:
        return generate()
    finally:
        stop_recording(layer for layer in getattr(request.cache, "layers", ()) if id(layer) not in recorded)


def _stand_in(session: BaseSession | None, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the session's replacement of a model's `forward`, or `forward` itself."""
    replacement = None if session is None else session.chunked or session.captured
    return forward if replacement is None else replacement


def _run(forward: Forward | None, decode: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if forward is not None:
        return forward.session.run(forward, decode, args, kwargs)
    outer, here.forward = here.forward, None
    try:
        return decode(*args, **kwargs)
    finally:
        here.forward = outer


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if here.forward is not None:
        here.forward.session.before(here.forward, module, args, kwargs)


def _after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    del args, kwargs
    return output if here.forward is None else here.forward.session.after(here.forward, module, output)


def _note_ids(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    ids = kwargs.get("input_ids", args[0] if args else None)
    here.given = ids if isinstance(ids, Tensor) and ids.dim() == 2 else None
    here.cells = None if here.given is None else cells_in(module.config, here.given, kwargs, here.request)


def _forget_ids(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    del module, args, output
    here.given = here.cells = None


def _generates(model: PreTrainedModel) -> bool:
    """Whether this thread runs a `generate` of the model that began before any block was open."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _GENERATE and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False


def _name(config: PreTrainedConfig, name: str) -> None:
    config._attn_implementation_internal = name
