# SPDX-License-Identifier: Apache-2.0
"""Hooks that presses put on a model, shared by the blocks that are open on it, and the choice of a block for each call.

A block serves the thread, or asynchronous task, that entered it. A thread that entered none, such as one that generates for a
streamer, is served where it makes no difference by which block: all open ones have the same press. Blocks of different presses
are open beside each other in different threads, never inside each other. A request that began inside a block ends under its
press, also where the block has been left by then: the model is restored after it.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.generation import GenerationMixin
from transformers.modeling_utils import PreTrainedModel

from kvpress.core.press import BasePress
from kvpress.hf.attention.functions import NAME, PressName, register
from kvpress.hf.attention.self_caching import attend
from kvpress.hf.cache.layer import stop_recording
from kvpress.hf.generation.replay import check_captured_generate
from kvpress.hf.grids import cells_in, grids_among
from kvpress.hf.models import cache_among, embedder_of
from kvpress.hf.session.checks import check_generate, check_weights, copies_of, is_assistant, setting, takes_back
from kvpress.hf.session.compiled import run_eagerly
from kvpress.hf.session.hooks import Hook, Replaced
from kvpress.hf.session.requests import Forward, Request, here
from kvpress.hf.session.running import Running
from kvpress.hf.session.token_dropping import decoder_layers, hand_on

_changes = threading.RLock()
_installed: dict[int, Installation] = {}
"""What is installed, by the id of every configuration that was switched (configurations are not hashable)."""
_entered: ContextVar[tuple[int, ...]] = ContextVar("entered", default=())
"""Numbers of the blocks that this thread, or asynchronous task, has entered."""
_numbers = itertools.count()
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__


class Block:
    """Identity of a `with` block: its number, and whether it serves the thread that entered it alone (`private`).

    Open blocks that do the same to every cache share a `group`, a number.
    """

    def __init__(self, private: bool) -> None:
        self.number = self.group = next(_numbers)
        self.private = private

    def enter(self) -> None:
        """Note that this thread has entered the block."""
        _entered.set((*_entered.get(), self.number))

    def leave(self) -> None:
        """Forget the block; it may have been entered in another thread."""
        _entered.set(tuple(number for number in _entered.get() if number != self.number))

    @property
    def is_ours(self) -> bool:
        """Whether this thread has entered the block."""
        return self.number in _entered.get()


def check_free(session: Running) -> None:
    """Refuse a block inside that of another press, and one of a model that shares its configuration object.

    Raises:
        RuntimeError: this thread has entered a block of another press, or a model that shares the configuration has a block.
    """
    with _changes:
        found = _installed.get(id(session.model.config))
        if found is None:
            return
        if found.model is not session.model:
            raise RuntimeError(
                "a press is already active on another model that shares its configuration object with this one: leave its "
                "block first, or give one of them a configuration of its own (copy.deepcopy(config))"
            )
        for other in found.sessions:
            if other.block.is_ours and not _alike(other, session):
                raise RuntimeError(
                    f"{_shown(other)} is already active on this model in this thread, so {_shown(session)} cannot be: compose "
                    "presses instead of nesting them, `press_a + press_b`; to use one after the other, leave the first block "
                    "before"
                )


def install(session: Running) -> Installation:
    """Open a block on its model."""
    with _changes:
        check_free(session)
        found = _installed.get(id(session.model.config)) or Installation(session)
        found.open(session)
        return found


def is_inside_block(model: Any) -> bool:
    """Whether this thread has entered a block that is open on a model."""
    with _changes:
        found = _installed.get(id(model.config))
        return found is not None and any(session.block.is_ours for session in found.sessions)


def _shown(session: Running) -> str:
    text = repr(session.press)
    return (text if len(text) <= 120 else f"{text[:117]}...") + ("" if session.evict else " (reading)")


def _alike(one: Running, other: Running) -> bool:
    """Whether two sessions do the same to every cache."""
    return (
        one.evict == other.evict
        and (one.recorder is None) == (other.recorder is None)
        and not one.block.private
        and not other.block.private
        and same(one.press, other.press)
    )


def same(one: Any, other: Any) -> bool:
    """Whether two settings are the same, presses and tensors included."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.shape == other.shape and one.device == other.device and bool((one == other).all())
    if isinstance(one, BasePress):
        mine, theirs = ({n: v for n, v in vars(press).items() if n != "_last_cache"} for press in (one, other))
        return same(mine, theirs)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False


class Installation:
    """The hooks and methods that were put on one model, and the sessions of the blocks that are open on it.

    `running` counts calls under way, of any thread: they keep what is installed.
    """

    def __init__(self, session: Running) -> None:
        self.model: PreTrainedModel = session.model
        self.decoder: nn.Module = session.decoder
        self.modules = session.modules
        self.sessions: list[Running] = []
        self.running = 0
        self.forward: Replaced | None = None
        self.hands_on = False
        self._was_open_to_all = False
        self._undo: list[Callable[[], Any]] = []
        self._undo_generate: Callable[[], Any] | None = None

    # -- blocks ----------------------------------------------------------------------------------------------

    def open(self, session: Running) -> None:
        """Add a block, and put on the model what is not there yet."""
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
            twin = next((other for other in self.sessions if _alike(other, session)), session)
            session.block.group = twin.block.group
            self.sessions.append(session)
            self._was_open_to_all |= not session.block.private
            session.block.enter()
        except BaseException:
            self._restore()
            raise

    def close(self, session: Running) -> None:
        """Take a block away; after the last one the model is restored, once nothing is under way any more."""
        with _changes:
            session.block.leave()
            self.sessions.remove(session)
            self._restore()

    def _install(self, session: Running) -> None:
        if not self.modules:
            return  # of a model that no press can work on, under one that does nothing
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
                # Presses written for NVIDIA kvpress read it there.
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
                    f"{type(module).__name__} did not take the attention function `{NAME}`: this model does not use "
                    "the attention interface of transformers"
                )

    def _restore(self) -> None:
        """Undo what no open block and no call under way needs, newest first."""
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

    def _begin(self) -> tuple[Running | None, bool]:
        """Count a call; return its session, and whether the call's cache is that of the session's own block.

        Raises:
            RuntimeError: this thread has entered no block, and those that are open have different presses.
        """
        with _changes:
            session, owns_cache = self._serving()
            self.running += 1
            return session, owns_cache

    def _serving(self) -> tuple[Running | None, bool]:
        """Return the innermost block that this thread has entered; else one of those open to all, which must be alike."""
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
                f"this thread has entered no block, and others have different ones: {presses}. "
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
        """Return the call of `generate` on this model that is under way in this thread, if any."""
        return here.request if here.request is not None and here.request.model is self.model else None

    def _generate(self, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        session, owns_cache = self._begin()
        outer, here.request = here.request, Request(self.model, session, owns_cache)
        try:
            if session is not None:
                cache = cache_among(kwargs.values())
                if cache is not None:
                    here.request.cache, here.request.prompt_start = cache, int(cache.get_seq_length())
                here.request.prompt_end = check_generate(self.model, *args, **kwargs)
                given = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
                if setting("output_attentions", kwargs, (given, self.model.generation_config)):
                    check_weights(session.recipe, self.model.config, kwargs.get("attention_mask"), later=True)
                here.request.copies = copies_of(self.model, given, kwargs)
                here.request.takes_back = takes_back(self.model, given, kwargs)
                here.request.grids = grids_among(kwargs)
                if here.request.takes_back:
                    here.request.prompt = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
                if session.captured is not None:
                    check_captured_generate(self.model, *args, **kwargs)
                if here.request.takes_back and not is_assistant(given):
                    return _recording(here.request, lambda: generate(*args, **kwargs))
            elif not self.sessions and self._was_open_to_all:
                raise RuntimeError(
                    "this `generate` was taken from the model inside a `with press(model):` block that has been left since; "
                    "keep the block open until a thread that generates is done (thread.join())"
                )
            return generate(*args, **kwargs)
        finally:
            here.request = outer
            if session is not None and session.captured is not None:
                session.captured.forget()
            self._end()

    def _run_model(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the whole model, which a session may replay, or read a prompt by in chunks; it counts as a request of its own."""
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
        """Run the decoder as a pass of its session, or as if nothing were installed where it has none."""
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
    """Generate on a cache that records what happens to it, and let it be afterwards as it was before."""
    given = request.cache
    before = {id(layer) for layer in getattr(given, "layers", ()) if getattr(layer, "record_past", False)}
    try:
        return generate()
    finally:
        stop_recording(layer for layer in getattr(request.cache, "layers", ()) if id(layer) not in before)


def _stand_in(session: Running | None, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return what runs in the place of a model's own `forward`."""
    found = None if session is None else session.chunked or session.captured
    return forward if found is None else found


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
    given = kwargs.get("input_ids", args[0] if args else None)
    here.given = given if isinstance(given, Tensor) and given.dim() == 2 else None
    here.cells = None if here.given is None else cells_in(module.config, here.given, kwargs, here.request)


def _forget_ids(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    del module, args, output
    here.given = here.cells = None


def _generates(model: PreTrainedModel) -> bool:
    """Whether this thread is inside a `generate` of a model, which began before there was a block: later ones are requests."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is _GENERATE and frame.f_locals.get("self") is model:
            return True
        frame = frame.f_back
    return False


def _name(config: Any, name: str) -> None:
    config._attn_implementation_internal = name
