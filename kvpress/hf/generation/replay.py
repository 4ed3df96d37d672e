# SPDX-License-Identifier: Apache-2.0
"""Replay recorded decode steps: a replacement of the model's forward."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel

from kvpress.cache.guard import lock_of
from kvpress.cache.store import KVStore
from kvpress.cache.window import Cursor, RealTokens
from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.generation.capture import SPARE, GraphRecorder, Outputs, Recorder, Replay
from kvpress.hf.models import CACHE, arguments_of
from kvpress.hf.session.base import BaseSession
from kvpress.hf.session.checks import setting, takes_back
from kvpress.hf.session.requests import Forward, Request, as_pass, generated_behind, here, leave_inference_mode
from kvpress.observe.call import LayerCall


@dataclass
class StaticPass:
    """State of a forward pass that does not change the counters on the host."""

    real_tokens: RealTokens | None
    """Real tokens of the cache; None without padding."""
    calls: list[LayerCall] = field(default_factory=list)
    """Calls of the layers in the pass."""


_one_at_a_time = threading.RLock()
"""Lock of replays: recordings share memory, so outputs must be copied before the next replay."""


class CapturedForward(threading.local):
    """Forward of a model that replays decode steps of one token per row, and runs all other calls unchanged.

    Each thread has its own recordings and cache.
    """

    def __init__(self, session: BaseSession, forward: Callable[..., Any], recorder: Recorder) -> None:
        update_wrapper(self, forward, updated=())
        self.session = session
        self.forward = forward
        self.names = list(inspect.signature(forward).parameters)
        self.replay = Replay(recorder, self._step)
        self.kind: type[Any] = dict
        self.forget()

    def forget(self) -> None:
        """Release the recording and its cache."""
        self.replay.forget()
        self.calls: list[LayerCall] = []
        self.real_tokens: RealTokens | None = None
        self.rest: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = arguments_of(self.names, args, kwargs)
        for name in ("output_hidden_states", "output_attentions"):
            if arguments.get(name, getattr(self.session.model.config, name, False)):
                raise ValueError(f"a replayed step gives logits only: leave out {name} or use capture=False")
        stores = self._stores(arguments)
        if not stores:
            return self.forward(**arguments)
        with lock_of(arguments[CACHE]):
            return self._read(stores, arguments)

    def _read(self, stores: list[KVStore], arguments: dict[str, Any]) -> Any:
        """Read one token per row, with the recorded step if there is one."""
        self._admit(arguments[CACHE])
        ids, mask = arguments["input_ids"], arguments.pop("attention_mask", None)
        real = (
            None
            if mask is None
            else generated_behind(mask.to(ids.device, torch.bool), self._request(), arguments[CACHE])
        )
        cursors = self._cursors(stores, real)
        if cursors is None:
            return self.forward(**arguments, attention_mask=mask)
        if arguments.get("position_ids") is None:
            arguments["position_ids"] = torch.full((1, 1), stores[0].seen, device=ids.device)
        inputs = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        seen, self.real_tokens = stores[0].seen, real
        try:
            for store in stores:
                store.count_token()
            with _one_at_a_time:
                outputs = self.replay(cursors, inputs, {n: v for n, v in arguments.items() if n not in inputs})
        except BaseException:
            for store in stores:
                store.restart_at(seen)
            self.replay.forget()
            raise
        try:
            for call in self.calls:
                call.tokens.mask, call.tokens.seen_before = None if real is None else real.real, seen
                self.session.follow(call)
            if self.session.follows:
                self.session.finish(arguments[CACHE], self.calls, ids, arguments["position_ids"])
        except BaseException:
            for layer in arguments[CACHE].layers:
                layer.interrupted = seen
            raise
        return self.kind(**outputs, **self.rest)

    def _step(self, inputs: dict[str, Tensor], settings: dict[str, Any]) -> Outputs:
        """Run the model on fixed inputs, and keep the state of the pass that replays need."""
        static = StaticPass(self.real_tokens)
        owns_cache = not self.session.shares_caches
        with as_pass(Forward(self.session, self._request(), static=static, owns_cache=owns_cache)):
            output = self.forward(**inputs, **settings)
        self.calls = static.calls
        tensors = {name: value for name, value in output.items() if isinstance(value, Tensor)}
        self.kind, self.rest = type(output), {name: value for name, value in output.items() if name not in tensors}
        return tensors

    def _stores(self, arguments: dict[str, Any]) -> list[KVStore]:
        """Return the stores of a call that reads one token per row after a compressed cache; empty for other calls."""
        cache, ids, mask = (arguments.get(name) for name in (CACHE, "input_ids", "attention_mask"))
        if not isinstance(cache, Cache) or not isinstance(ids, Tensor) or torch.is_grad_enabled():
            return []
        layers = [layer for layer in cache.layers if isinstance(layer, PressLayer)]
        stores = [layer.store for layer in layers if layer.store is not None]
        seen, config, request = cache.get_seq_length(), self.session.model.config, self._request()
        # Models of several modalities count positions in their own way.
        has_positions = arguments.get("position_ids") is not None or config.get_text_config() is config
        fits = (
            has_positions
            and len(stores) == len(self.session.modules)
            and tuple(ids.shape) == (stores[0].batch, 1)
            and all(store.seen == seen for store in stores)
            and seen >= (0 if request is None else request.prompt_end)
            and (
                not any(layer.needs_mask for layer in layers)  # refused by the pass
                if mask is None
                else isinstance(mask, Tensor) and tuple(mask.shape) == (stores[0].batch, seen + 1)
            )
            and arguments.get("return_dict") is not False
        )
        return stores if fits else []

    def _request(self) -> Request | None:
        return here.request if here.request is not None and here.request.session is self.session else None

    def _admit(self, cache: Cache) -> None:
        """Check a cache as a pass without replay does."""
        first = next(layer for layer in cache.layers if isinstance(layer, PressLayer))
        first.check_whole()
        leave_inference_mode(cache, first)

    def _cursors(self, stores: list[KVStore], real: RealTokens | None) -> list[Cursor] | None:
        """Return the cursor of every layer, or None if a layer cannot append a token without the host."""
        cursors = []
        for plan, store in zip(self.session.layers.values(), stores, strict=True):
            cursor = store.ready(real, SPARE if plan.codec is None else min(SPARE, plan.codec.interval(store.device)))
            if cursor is None:
                return None
            cursors.append(cursor)
        return cursors


def check_capture(session: BaseSession) -> None:
    """Refuse models and presses whose decode steps cannot be replayed."""
    name, press = type(session.model).__name__, type(session.press).__name__
    kinds = sorted({kind for kind in session.kinds if kind != "full_attention"})
    if kinds:
        raise ValueError(
            f"capture needs full attention in every layer, but {name} has {kinds[0]} layers, whose caches move with every "
            "token; use capture=False"
        )
    if session.reads_itself:
        raise ValueError(f"{name} reads its cache by itself, so no step of it can be replayed; use capture=False")
    if session.recipe.offloads:
        raise ValueError(
            f"{press} fetches pairs from host memory or a file for every token, which a replayed step cannot; use capture=False"
        )
    if session.executor.watched["decode"]:
        raise ValueError(f"{press} watches every generated token, which a replayed step cannot show; use capture=False")
    if session.executor.follows("decode"):
        raise ValueError(f"{press} acts on whole passes while tokens are generated; use capture=False")
    kind = str(getattr(getattr(session.decoder, "rotary_emb", None), "rope_type", ""))
    if "dynamic" in kind or "longrope" in kind:
        raise ValueError(f"the rotary embedding of {name} changes with the length on the host; use capture=False")
    if "position_ids" not in inspect.signature(session.model.forward).parameters:
        raise ValueError(f"{name} takes no position_ids, so its positions are set on the host; use capture=False")


def check_captured_generate(model: Any, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> None:
    """Refuse ways of generating whose steps cannot be replayed."""
    if takes_back(model, generation_config, kwargs):
        raise ValueError(
            "assisted decoding reads several tokens at a time, so its steps cannot be replayed; use capture=False"
        )
    del inputs
    beams = setting("num_beams", kwargs, (generation_config, model.generation_config))
    if beams is not None and beams > 1:
        raise ValueError(
            f"num_beams={beams} rearranges the cache at every token, so no step can be replayed; use num_beams=1 or "
            "capture=False"
        )


def graph_recorder(model: PreTrainedModel) -> Recorder:
    """Return a recorder of CUDA graphs for the decode steps of a model."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        raise ValueError(f"capture needs a model on one device, this one is on {', '.join(devices)}; use capture=False")
    return GraphRecorder(model.device)
