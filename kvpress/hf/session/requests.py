# SPDX-License-Identifier: Apache-2.0
"""State of the running calls of `generate` and of the running forward passes, for each thread.

All state of a pass is in its `Forward`, which the running thread holds. So threads do not see each other's passes, the outer
pass is current again after an inner one, and a failed pass leaves no state for the next.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache

from kvpress.cache.attention import Logits
from kvpress.cache.guard import lock_of
from kvpress.cache.storage import moved
from kvpress.cache.window import RealTokens
from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.session.base import BaseSession
from kvpress.hf.session.checks import wants_weights
from kvpress.observe.call import Cells, LayerCall, NewTokens
from kvpress.observe.passes import Nearby, Watch

_UNCHANGED: AbstractContextManager[None] = nullcontext()

reading: dict[int, Forward] = {}
"""Running passes by the id of the cache that they read."""


@dataclass(eq=False)
class Request:
    """A call of `generate`, or of the model's forward outside of it."""

    model: Any
    """Model that is called."""
    session: BaseSession | None
    """Session that serves the call; None without a press."""
    owns_cache: bool = True
    """Whether the session may record the cache as its own; False if several blocks could own it."""
    cache: Cache | None = None
    """First cache that the call uses; further ones, as for a negative prompt, are not compressed as prompts."""
    prompt_end: int = 0
    """Length of a prompt that is read in chunks; else 0. Where each chunk is a turn, the end of the current one."""
    last_chunk_end: int = 0
    """Length of a prompt whose chunks are turns, while it is read; else 0."""
    prompt_start: int = 0
    """Tokens that the cache had seen before the call, or before the current chunk where each is a turn."""
    first_chunk_start: int = 0
    """Tokens that the cache had seen before a prompt whose chunks are turns, while it is read."""
    takes_back: bool = False
    """Whether tokens behind the prompt may be taken back, so that the cache records its changes."""
    prompt: Tensor | None = None
    """Ids `[B, T]` of the prompt, if tokens may be taken back."""
    grids: dict[str, Any] = field(default_factory=dict)
    """Arguments with the grids of the prompt's images, which `generate` does not pass to the model."""
    copies: int = 1
    """Consecutive rows with the same prompt, for beams or several answers."""
    real_tokens: RealTokens | None = None
    """Real tokens of the last pass over generated tokens, which the next pass extends."""

    def is_of(self, cache: Any) -> bool:
        """Whether a cache is the request's cache, or could become it."""
        return self.cache is None or self.cache is cache


def generated_behind(mask: Tensor, request: Request | None, cache: Any) -> RealTokens:
    """Return the real tokens of `mask [B, seen]` in a pass over generated tokens, which are never padding.

    Each pass of one call of `generate` extends the result of the last, so that only the first one waits for the device.
    """
    if request is None or not request.is_of(cache):
        return RealTokens(mask)
    request.real_tokens = RealTokens(mask, request.real_tokens)
    return request.real_tokens


def autocast_of(model: nn.Module) -> tuple[str, torch.dtype] | None:
    """Return the device and dtype of the autocast that a model would run under here; None without one."""
    device = next(model.parameters()).device.type
    return (device, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else None


@dataclass(eq=False)
class Forward:
    """A forward pass of the decoder under a press."""

    session: BaseSession
    """Session that the pass belongs to."""
    request: Request | None = None
    """Call of `generate` that the pass belongs to; None outside `generate`."""
    watch: Watch | None = None
    """Receiver of the calls while the session itself reads behind a cache."""
    nearby: Nearby | None = None
    """Pairs that layers attend to, if not to all."""
    parts: int = 0
    """Number of texts of equal length that are read side by side, as in `Pass.read`; 0 for one that is written to the cache."""
    differentiable: bool = False
    """Whether the pass is part of an autograd graph, so that the cache must not change."""
    static: Any = None
    """Recording of a decode step, while one is made."""
    owns_cache: bool = True
    """Whether the session may count the cache as its own; False if several sessions could."""
    cache: Cache | None = None
    """Cache of the pass, once its first layer is read."""
    call: LayerCall | None = None
    """Call of the attention module under way."""
    tokens: NewTokens | None = None
    """New tokens as the last layer saw them, if later layers share them."""
    passed: list[LayerCall] = field(default_factory=list)
    """Calls of earlier modules that the end of the pass needs."""
    lent: list[LayerCall] = field(default_factory=list)
    """Calls whose pairs later modules still read."""
    modules_left: int = 0
    """Attention modules that have not ended."""
    seen_before: int = 0
    """Tokens that the cache had seen before the pass."""
    mask: Tensor | None = None
    """Real tokens `[B, seen]`, for modules that read the cache by themselves; None where nothing is padded."""
    axes: Tensor | None = None
    """Positions `[n, B, Q]` of the new tokens where a model counts positions along several axes."""
    ids: Tensor | None = None
    """Ids `[B, Q]` of the new tokens; None where they came as embeddings."""
    given: Tensor | None = None
    """Ids that a model with images embedded itself and passed to its decoder as embeddings."""
    cells: Cells | None = None
    """Layout of the images and videos among `given`."""
    subset: Any = None
    """Tokens that layers receive (`kvpress.hf.session.token_dropping`); None for all."""
    weights: bool = False
    """Whether layers return attention weights."""
    autocast: tuple[str, torch.dtype] | None = None
    """Device and dtype of the autocast that the model runs under; None without one."""
    guard: Any = None
    """Lock of the cache, which readers in other threads wait for."""
    thread: str = field(default_factory=lambda: threading.current_thread().name)
    """Name of the thread that runs the pass."""

    @classmethod
    def of(cls, session: BaseSession | None, request: Request | None, owns_cache: bool) -> Forward | None:
        """Return a new pass of a session, or None without a session."""
        ids, cells = here.given, here.cells
        here.given = here.cells = None
        return None if session is None else cls(session, request, owns_cache=owns_cache, given=ids, cells=cells)

    def with_autocast(self, enabled: bool) -> AbstractContextManager[Any]:
        """Return a context in which the model's autocast, if it runs under one, is on or off.

        Presses compute without it: it would round their float32 statistics, and joins no tensors of different 16-bit dtypes.
        """
        if self.autocast is None:
            return _UNCHANGED
        device, dtype = self.autocast
        return torch.autocast(device, dtype, enabled=enabled)

    def ids_among(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the ids `[B, Q]` of the decoder's new tokens, or None if they came as embeddings of unknown ids."""
        ids: Tensor | None = kwargs.get("input_ids", args[0] if args else None)
        embeds = kwargs.get("inputs_embeds")
        if ids is None and self.given is not None and isinstance(embeds, Tensor):
            return self.given if self.given.shape == embeds.shape[:2] else None
        return ids

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the ids, the mask and the positions of the new tokens from the arguments of the decoder."""
        self.weights = wants_weights(kwargs, self.session.model.config)
        self.ids = self.ids_among(args, kwargs)
        self.cells = self.cells if self.ids is self.given else None
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if self.session.reads_itself and isinstance(mask, Tensor) and not bool(mask.all()):
            self.mask = mask.bool()
        if isinstance(positions, Tensor) and positions.dim() == 3:
            self.axes = (
                positions[1:] if len(positions) == 4 else positions
            )  # the first of four counts tokens, for masks

    def new_tokens(self, seen_before: int, candidates: bool) -> NewTokens | None:
        """Return the new tokens of the last layer if those of a layer that has seen `seen_before` tokens are the same."""
        tokens = self.tokens
        same = tokens is not None and tokens.seen_before == seen_before and tokens.candidates == candidates
        return tokens if same else None

    def prompt_end(self, cache: Cache) -> int:
        """Return the tokens that a cache will have seen after a prompt in chunks; 0 for other prompts."""
        return self.request.prompt_end if self.request is not None and self.request.is_of(cache) else 0

    def prompt_length(self, cache: Cache) -> int:
        """Return `prompt_end`, of the whole prompt where its chunks are turns."""
        end = self.prompt_end(cache)
        return max(end, self.request.last_chunk_end) if end and self.request is not None else end

    def around_chunk(self, cache: Cache) -> tuple[int, int] | None:
        """Return the tokens seen before and after a prompt whose chunks are turns; None for other prompts."""
        request = self.request
        if request is None or not request.last_chunk_end or not self.prompt_end(cache):
            return None
        return request.first_chunk_start, request.last_chunk_end

    def copies(self, cache: Cache) -> int:
        """Return the number of consecutive rows with the same prompt."""
        return self.request.copies if self.request is not None and self.request.is_of(cache) else 1

    def begin(self, cache: Cache) -> None:
        """Lock a cache before its first layer is read.

        Raises:
            RuntimeError: another pass reads the cache, or a failed pass has read only some of its layers.
        """
        if self.watch is None:
            reader = reading.setdefault(id(cache), self)
            if reader is not self:
                raise RuntimeError(
                    f"this cache is being read by another forward pass, in thread {reader.thread!r}: a cache serves one "
                    "request; pass each request its own cache, or a copy (copy.deepcopy(cache)) made before"
                )
            self.guard = lock_of(cache)
            self.guard.acquire()
        self.cache = cache
        if self.request is not None and self.request.cache is None:
            self.request.cache = cache
        first = next((layer for layer in cache.layers if isinstance(layer, PressLayer)), None)
        if first is not None:
            first.check_whole()
            self.seen_before = first.get_seq_length()
        leave_inference_mode(cache, first)
        if self.owns_cache and self.watch is None:
            self.session.cache = cache if self.request is None else self.request.cache

    def lent_call(self, key: Tensor) -> LayerCall | None:
        """Return the call of the layer that wrote `key`, for modules that read the pairs of another layer."""
        return next((call for call in self.lent if call.written is not None and call.written[0] is key), None)

    def release(self) -> LayerCall | None:
        """Detach the call from this pass and its cache layer, so that neither keeps the other alive."""
        call, self.call = self.call, None
        if call is not None:
            layer = call.cache.layers[call.layer.cache_index]
            layer.call, layer.static, layer.read_only = None, False, False
            layer.padded, layer.rows_chosen = call.tokens.mask is not None, False
        return call

    def end(self) -> None:
        """Release the cache and its lock."""
        self.release()
        if self.cache is not None and reading.get(id(self.cache)) is self:
            del reading[id(self.cache)]
        if self.guard is not None:
            self.guard.release()
            self.guard = None

    def fail(self) -> None:
        """Mark the layers of the cache as interrupted, if only some were read or compressed."""
        completed = self.modules_left == 0 and not self.session.follows and not self.lent
        if self.cache is not None and reading.get(id(self.cache)) is self and not completed:
            for layer in self.cache.layers:
                if isinstance(layer, PressLayer):
                    layer.interrupted = self.seen_before


class InterceptedError(Exception):
    """Signal that ends the forward pass of an attention module once its queries, keys, logits and sinks are computed."""

    def __init__(self, queries: Tensor, keys: Tensor, logits: Logits, sinks: Tensor | None) -> None:
        super().__init__()
        self.queries = queries
        self.keys = keys
        self.logits = logits
        self.sinks = sinks


class Here(threading.local):
    """Running calls of this thread."""

    request: Request | None = None
    """Innermost call of `generate`."""
    forward: Forward | None = None
    """Innermost forward pass."""
    prepared: Forward | None = None
    """Pass for the next call of the decoder, if the session made it beforehand."""
    intercepted: nn.Module | None = None
    """Attention module that is run only to get its queries."""
    given: Tensor | None = None
    """Ids `[B, Q]`, images included, that a model embeds by itself before it calls its decoder."""
    cells: Cells | None = None
    """Layout of the images and videos among `given`."""


here = Here()


@contextmanager
def as_pass(forward: Forward) -> Iterator[None]:
    """Use `forward` as the pass of the next call of the decoder in this thread."""
    here.prepared = forward
    try:
        yield
    finally:
        here.prepared = None


def leave_inference_mode(cache: Cache, first: PressLayer | None) -> None:
    """Copy the inference tensors of a cache before a pass outside of inference mode, which could not write to them.

    `first` is the first `PressLayer` of the cache.
    """
    state = cache.__dict__
    if torch.is_inference_mode_enabled():
        state["_kvpress_inference"] = True
        return
    had_inference = state.pop("_kvpress_inference", False)
    if first is None or first.store is None or not (had_inference or first.store.window.keys.is_inference()):
        return
    device, shared = first.store.window.keys.device, state.get("_kvpress_shared", {})
    with torch.no_grad(), _CopyingWhatInferenceModeMade():
        for layer in cache.layers:
            if isinstance(layer, PressLayer) and layer.store is not None:
                layer.store.to(layer.store.window.keys.device)
        shared |= {name: moved(value, device, {}) for name, value in shared.items()}


class _CopyingWhatInferenceModeMade(TorchFunctionMode):
    """Make `Tensor.to` copy inference tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.clone() if func is Tensor.to and result.is_inference() else result
