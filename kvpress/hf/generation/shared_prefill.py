# SPDX-License-Identifier: Apache-2.0
"""Prefill shared by several presses: one forward pass of the prompt, one compressed cache for each press."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel

from kvpress.core.effect import warn_if_idle
from kvpress.core.press import BasePress
from kvpress.core.spec import get_press
from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.generation.clock import now
from kvpress.hf.models import cache_place, new_cache, with_cache
from kvpress.hf.session.checks import check_forward
from kvpress.hf.session.requests import Forward
from kvpress.hf.session.session import Session
from kvpress.observe.call import LayerCall
from kvpress.observe.spans import SPANS, SpanTracker


@dataclass(frozen=True)
class Prefill:
    """Result of a shared prefill."""

    logits: Tensor
    """Logits `[B, V]` after the last token."""
    caches: list[Cache]
    """One cache for each press."""
    seconds: float
    """Time of the prefill without the presses."""
    press_seconds: list[float]
    """Additional time of each press."""


def prefill(
    model: PreTrainedModel, presses: Sequence[BasePress | str], input_ids: Tensor, attention_mask: Tensor | None = None
) -> Prefill:
    """Read `input_ids [B, n]` once; every press, or spec, compresses its own cache layer by layer.

    Each cache equals that of the press alone, random draws included; the state of torch's generator is restored. Memory holds
    all compressed caches and one uncompressed layer.

    Raises:
        ValueError: no press, a press that does not support the prompt or a shared prefill, or padding on the right.
    """
    if not presses:
        raise ValueError("prefill needs at least one press, got none; `none` reads the prompt as it is")
    shared = SharedSession([get_press(press) for press in presses], model)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    with torch.no_grad(), shared.installed():
        cache = new_cache(model)
        started = now(input_ids.device)
        logits = model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=(mask.cumsum(dim=-1) - 1).clamp(min=0),
            **with_cache(cache),
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        seconds = now(input_ids.device) - started - sum(branch.seconds for branch in shared.branches)
        caches = shared.finish_caches(cache, input_ids)
        return Prefill(logits, caches, seconds, [branch.seconds for branch in shared.branches])


class SharedSession(Session):
    """Session of the plain model that passes every layer to the branch of each press, then frees its pairs."""

    def __init__(self, presses: Sequence[BasePress], model: PreTrainedModel) -> None:
        super().__init__(BasePress(), model, private=True)
        self.lends = set()  # a first prompt passes all pairs to every layer
        for press in presses:
            if not press.recipe().shares_prefill:
                raise ValueError(
                    f"{type(press).__name__} reads the prompt again, or in its own way, so it cannot share a prefill; use "
                    "`with press(model)` for it"
                )
            warn_if_idle(press)
        self.branches = [Branch(press, model) for press in presses]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Install the session for the length of a block."""
        self.enter()
        try:
            yield
        finally:
            self.exit()
            for branch in self.branches:
                branch.exit()

    def prepare(self) -> None:
        super().prepare()
        for branch in self.branches:
            branch.prepare()

    def check(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del forward
        for branch in self.branches:
            tokens = check_forward(branch.recipe, args, kwargs, self.model.config, 0, self.cached)
            self.note_length(branch.recipe, tokens, kwargs)

    def observe(self, call: LayerCall) -> None:
        for branch in self.branches:
            with branch.at_work(call.queries.device):
                branch.begin(call)

    def follow(self, call: LayerCall) -> None:
        if call.store is None:
            return
        for branch in self.branches:
            with branch.at_work(call.queries.device):
                branch.end()
        layers, index = call.cache.layers, cache_place(call.layer.module)
        layers[index] = layers[index].empty_twin()

    def finish_caches(self, read: Cache, ids: Tensor) -> list[Cache]:
        """Return the caches of all branches, with copies of the layers that no press replaces."""
        for branch in self.branches:
            branch.finish_cache(read, ids)
        return [branch.cache for branch in self.branches]


class Branch(Session):
    """Session of one press in a shared prefill; it is never installed."""

    def __init__(self, press: BasePress, model: PreTrainedModel) -> None:
        super().__init__(press, model)
        self.cache: Cache = new_cache(model)
        self.passed: list[LayerCall] = []
        self.own: dict[int, PressLayer] = {}
        self.call: LayerCall | None = None
        self.seconds = 0.0
        self._draws: dict[torch.device, list[Tensor]] = {}

    @contextmanager
    def at_work(self, device: torch.device) -> Iterator[None]:
        """Measure the time of the press, and use its own state of the random generators."""
        started = now(device)
        before = _generators(device)
        _set_generators(device, self._draws.get(device, before))
        try:
            yield
        finally:
            self._draws[device] = _generators(device)
            _set_generators(device, before)
            self.seconds += now(device) - started

    def begin(self, call: LayerCall) -> None:
        """Begin a layer after its attention has run, and run the observers."""
        layer = PressLayer(self.cache)
        layer.lazy_initialization(call.store.window.keys, call.store.window.values)
        assert layer.store is not None  # noqa: S101 - for type checkers
        # All branches share the pairs of the window until the press has acted.
        layer.store.window, layer.store.seen = copy.copy(call.store.window), call.store.seen
        layer.store.window.side = {}
        place = cache_place(call.layer.module)
        layer.serve(call.layer)
        self.own[place] = layer
        self.call = replace(
            call,
            store=layer.store,
            kwargs={**call.kwargs, "past_key_values": self.cache},
            tokens=replace(
                call.tokens,
                shared=self.cache.__dict__.setdefault("_kvpress_shared", {}),
                tracker=self._own_tracker if self.recipe.reads_tokens else None,
                rules=self.recipe.observed_rules,
            ),
            left={},
        )
        self.observe(self.call)

    def _own_tracker(self) -> SpanTracker:
        tracker: SpanTracker = self.own[min(self.own)].store.observers[SPANS]  # type: ignore[union-attr]
        return tracker

    def end(self) -> None:
        """Compress the current layer, and copy the pairs that stay in the window."""
        call, self.call = self.call, None
        assert call is not None  # noqa: S101 - for type checkers
        self.follow(call)
        if self.executor.follows("prefill"):
            self.passed.append(call.without_tensors())
        window = call.store.window
        if window.length:
            window.keys, window.values = window.filled_keys.clone(), window.filled_values.clone()

    def finish_cache(self, read: Cache, ids: Tensor) -> None:
        """Put the layers into the cache of this branch."""
        self.cache.layers = [
            layer.empty_twin().take_over(self.own[index]) if index in self.own else copy.deepcopy(layer)
            for index, layer in enumerate(read.layers)
        ]
        for layer in self.cache.layers:
            if isinstance(layer, PressLayer):
                layer.belong_to(self.cache)
        calls, self.passed = self.passed, []
        if calls:
            with self.at_work(ids.device):
                self.finish(self.cache, calls, ids, None)


def _generators(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _set_generators(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
