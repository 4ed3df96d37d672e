# SPDX-License-Identifier: Apache-2.0
"""What is under way, thread by thread: calls of `generate`, and forward passes of a decoder.

Whatever belongs to a pass stands on a `Forward`, and that on the thread which runs it: threads do not see each other's passes,
a pass inside another one comes back to it, and a pass that failed leaves nothing for the next.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.cache_utils import Cache

from kvpress.cache.guard import lock_of
from kvpress.cache.storage import moved
from kvpress.cache.window import RealTokens
from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.models import cache_place
from kvpress.hf.session.checks import wants_weights
from kvpress.hf.session.running import Running
from kvpress.observe.call import Cells, LayerCall
from kvpress.observe.passes import Watch

reading: dict[int, Forward] = {}
"""The pass that reads a cache, by the id of every cache that is being read."""


@dataclass(eq=False)
class Request:
    """A call of `generate`, of the first `cache` that it uses: others, such as that of a negative prompt, only help it.

    `prompt_end` is the length of its prompt where that comes in chunks, else 0, and `prompt_start` how much of it the cache had
    seen before. Without a `session` it is none of a press, and without `owns_cache` no block can say that the cache is its own.
    With `takes_back`, tokens behind its `prompt [B, T]` may be taken back, so that its cache records what happens to it.
    `grids` are the arguments that tell those of the prompt's pictures, which `generate` does not hand to the model. So
    many rows in a row as `copies` says are the same prompt, for beams and for several answers to one prompt. `real_tokens` are
    those that a pass over generated tokens has seen, which later passes continue.
    """

    model: Any
    session: Running | None
    owns_cache: bool = True
    cache: Cache | None = None
    prompt_end: int = 0
    prompt_start: int = 0
    takes_back: bool = False
    prompt: Tensor | None = None
    grids: dict[str, Any] = field(default_factory=dict)
    copies: int = 1
    real_tokens: RealTokens | None = None

    def is_of(self, cache: Any) -> bool:
        """Whether a cache is the one that the call is about."""
        return self.cache is None or self.cache is cache


def generated_behind(mask: Tensor, request: Request | None, cache: Any) -> RealTokens:
    """Return the real tokens of `mask [B, seen]` in a pass over generated tokens, which are all real.

    Passes of one call of `generate` continue each other's, so that only the first one waits for the device.
    """
    if request is None or not request.is_of(cache):
        return RealTokens(mask)
    request.real_tokens = RealTokens(mask, request.real_tokens)
    return request.real_tokens


@dataclass(eq=False)
class Forward:
    """A forward pass of the decoder under a press."""

    session: Running
    """Session that the pass belongs to."""
    request: Request | None = None
    """Call of `generate` that the pass belongs to; None outside `generate`."""
    watch: Watch | None = None
    """Receiver of the calls while the session itself reads behind a cache."""
    static: Any = None
    """Recording of a decode step, while one is made."""
    owns_cache: bool = True
    """Whether the session may count the cache as its own; False if several sessions could."""
    cache: Cache | None = None
    """Cache of the pass, once its first layer is read."""
    call: LayerCall | None = None
    """Call of the attention module under way."""
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
    handed: Any = None
    """Tokens that layers receive (`kvpress.hf.session.token_dropping`); None for all."""
    weights: bool = False
    """Whether layers return attention weights."""
    guard: Any = None
    """Lock of the cache, which readers in other threads wait for."""
    thread: str = field(default_factory=lambda: threading.current_thread().name)
    """Name of the thread that runs the pass."""

    @classmethod
    def of(cls, session: Running | None, request: Request | None, owns_cache: bool) -> Forward | None:
        """Return a new pass of a session; None where there is none."""
        given, cells = here.given, here.cells
        here.given = here.cells = None
        return None if session is None else cls(session, request, owns_cache=owns_cache, given=given, cells=cells)

    def ids_among(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Return the ids `[B, Q]` of the tokens that the decoder is handed, None where nobody knows them."""
        ids: Tensor | None = kwargs.get("input_ids", args[0] if args else None)
        embeds = kwargs.get("inputs_embeds")
        if ids is None and self.given is not None and isinstance(embeds, Tensor):
            return self.given if self.given.shape == embeds.shape[:2] else None
        return ids

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note which tokens come, which are real and where they stand, from the arguments of the decoder."""
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

    def prompt_end(self, cache: Any) -> int:
        """Return how many tokens a cache will have seen once a prompt that comes in chunks is read, else 0."""
        return self.request.prompt_end if self.request is not None and self.request.is_of(cache) else 0

    def copies(self, cache: Any) -> int:
        """Return how many rows in a row begin with the same prompt."""
        return self.request.copies if self.request is not None and self.request.is_of(cache) else 1

    def begin(self, cache: Cache) -> None:
        """Take a cache, once its first layer is about to be read.

        Raises:
            RuntimeError: another pass is reading the cache, or one that failed has left it in between.
        """
        if self.watch is None:
            other = reading.setdefault(id(cache), self)
            if other is not self:
                raise RuntimeError(
                    f"this cache is being read by another forward pass, in thread {other.thread!r}: a cache belongs to one "
                    "request; give each its own, or a copy (copy.deepcopy(cache)) that was made before"
                )
            self.guard = lock_of(cache)
            self.guard.acquire()
        self.cache = cache
        if self.request is not None and self.request.cache is None:
            self.request.cache = cache
        ours = next((layer for layer in cache.layers if isinstance(layer, PressLayer)), None)
        if ours is not None:
            ours.check_whole()
            self.seen_before = ours.get_seq_length()
        leave_inference_mode(cache, ours)
        if self.owns_cache and self.watch is None:
            self.session.cache = cache if self.request is None else self.request.cache

    def lent_call(self, key: Tensor) -> LayerCall | None:
        """Return the call of the layer whose new keys these are, for modules that read the pairs of another layer."""
        return next((call for call in self.lent if call.written is not None and call.written[0] is key), None)

    def release(self) -> LayerCall | None:
        """Take the call off this pass and its cache layer, so that neither keeps the other alive."""
        call, self.call = self.call, None
        if call is not None:
            layer = call.cache.layers[cache_place(call.layer.module)]
            layer.call, layer.static, layer.padded = None, False, call.tokens.mask is not None
        return call

    def end(self) -> None:
        """Let go of the cache."""
        self.release()
        if self.cache is not None and reading.get(id(self.cache)) is self:
            del reading[id(self.cache)]
        if self.guard is not None:
            self.guard.release()
            self.guard = None

    def fail(self) -> None:
        """Mark the layers of a cache of which this pass has read some, or has compressed some, but not all."""
        whole = self.modules_left == 0 and not self.session.follows and not self.lent
        if self.cache is not None and reading.get(id(self.cache)) is self and not whole:
            for layer in self.cache.layers:
                if isinstance(layer, PressLayer):
                    layer.interrupted = self.seen_before


class Here(threading.local):
    """What this thread is doing: the innermost `request` and pass (`forward`) under way.

    `prepared` is the pass that the next call of the decoder will be, where the session has made it beforehand. `asked` is an
    attention module that is only asked for its queries. `given` are the ids `[B, Q]` that a model is about to embed by itself,
    with its images among them, and `cells` where these stand.
    """

    request: Request | None = None
    forward: Forward | None = None
    prepared: Forward | None = None
    asked: nn.Module | None = None
    given: Tensor | None = None
    cells: Cells | None = None


here = Here()


@contextmanager
def as_pass(forward: Forward) -> Iterator[None]:
    """Let the next call of the decoder in this thread be a certain pass."""
    here.prepared = forward
    try:
        yield
    finally:
        here.prepared = None


def leave_inference_mode(cache: Cache, first: PressLayer | None) -> None:
    """Copy what inference mode made of a cache, once a pass comes without: it could not be written to any more.

    `first` is the first layer of the cache that is ours.
    """
    state = cache.__dict__
    if torch.is_inference_mode_enabled():
        state["_kvpress_inference"] = True
        return
    made = state.pop("_kvpress_inference", False)
    if first is None or first.store is None or not (made or first.store.window.keys.is_inference()):
        return
    device, shared = first.store.window.keys.device, state.get("_kvpress_shared", {})
    with torch.no_grad(), _CopyingWhatInferenceModeMade():
        for layer in cache.layers:
            if isinstance(layer, PressLayer) and layer.store is not None:
                layer.store.to(layer.store.window.keys.device)
        shared |= {name: moved(value, device, {}) for name, value in shared.items()}


class _CopyingWhatInferenceModeMade(TorchFunctionMode):
    """Moving a tensor copies it where inference mode made it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.clone() if func is Tensor.to and found.is_inference() else found
