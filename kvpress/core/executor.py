# SPDX-License-Identifier: Apache-2.0
"""Runs recipes: evicts after layers and passes, by the scorer, amount, allocator, schedule and rewrite of each eviction."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from kvpress.cache.codec import Codec
from kvpress.cache.rewrite import positions_of, seal_streams
from kvpress.cache.store import KVStore
from kvpress.core.checks import check_finite
from kvpress.core.evict import evict
from kvpress.core.protection import free_pairs, left_of_spans, new_spans, note_done, warn_of_absent
from kvpress.core.recipe import Compress, Eviction, PassHook, Recipe
from kvpress.observe.call import LayerCall, Phase
from kvpress.observe.passes import Pass
from kvpress.observe.view import View, hook_arguments, score_arguments, view_groups

FOLLOW = "kvpress_follow"
"""Name under which a user's `forward_hook` gets what it runs by calling that of its base class."""
MASKED = "masked_key_indices"
"""Name under which presses written for NVIDIA kvpress leave indices (rows, heads, pairs) of what they evict on a module."""


class Executor:
    """What a recipe does to the layers of a cache; holds nothing of a request.

    An eviction waits for the end of a pass where it looks at all layers, where an earlier one does, or where a hook looks at
    the pass before; all others follow their layer at once, so that its memory is free before the next layer needs it. Without
    `evicts`, prompts are read and left whole.
    """

    def __init__(self, recipe: Recipe, evicts: bool = True) -> None:
        self.recipe = recipe
        self.evicts = evicts
        self.hooks = {phase: self._hooks(phase) for phase in ("prefill", "decode")}
        self.steps = {phase: self._acting(phase) for phase in ("prefill", "decode")}
        self.waiting = {phase: self._first_to_wait(phase) for phase in ("prefill", "decode")}
        self.watched = {
            "prefill": recipe.watched("prefill" if evicts else "decode"),
            "decode": recipe.watched("decode"),
        }

    def _hooks(self, phase: Phase) -> list[PassHook]:
        acts = self.evicts or phase == "decode"
        return [hook for hook in self.recipe.hooks if acts and phase in hook.phases]

    def _acting(self, phase: Phase) -> tuple[Eviction, ...]:
        """Return the evictions of a phase; those of generated tokens follow the tokens of later turns too."""
        if phase == "decode":
            return self.recipe.acting(phase)
        return tuple(
            step
            for step in self.recipe.evictions
            if (self.evicts and step.acts_in(phase)) or (step.acts_in("decode") and not step.schedule.prompt)
        )

    def _first_to_wait(self, phase: Phase) -> int:
        """Return which eviction of a phase is the first that waits for the end of the pass."""
        if any(hook.first for hook in self.hooks[phase]):
            return 0
        waits = [step.allocator.scope == "cache" or _prepares(step, phase) for step in self.steps[phase]]
        return waits.index(True) if True in waits else len(waits)

    def check(self) -> None:
        """Let hooks say, before any work, that they cannot act."""
        prepared = [step.prepare for steps in self.steps.values() for step in steps]
        for hook in (*prepared, *(hook for hooks in self.hooks.values() for hook in hooks)):
            if hook is not None:
                hook.check()

    def follows(self, phase: Phase) -> bool:
        """Whether something happens at the end of a pass of a phase."""
        return bool(self.hooks[phase]) or self.waiting[phase] < len(self.steps[phase])

    def after_layer(self, call: LayerCall) -> None:
        """Evict from one layer that has been read."""
        store = call.store
        if call.phase == "decode":
            store.since_eviction, store.counted = (
                store.since_eviction + store.seen - call.tokens.seen_before,
                store.seen,
            )
        elif _is_later_turn(call):
            if self.steps["decode"]:
                call.keep_store(call.tokens.seen_before)
            store.since_eviction, store.counted = store.since_eviction + 1, store.seen
        for place in range(self.waiting[call.phase]):
            self._evict([call], place)

    @property
    def chunk(self) -> int | None:
        """How many tokens of a prompt may be read at a time; None for any number."""
        return self.recipe.chunk if self.evicts else None

    def after_chunk(self, call: LayerCall) -> None:
        """Evict from one layer that has read a part of a prompt, where whole chunks are left."""
        if self.chunk is None or (call.tokens.prompt_end - call.store.seen) % self.chunk:
            return
        for place, step in enumerate(self.steps["prefill"]):
            if step.schedule.chunk is not None:
                self._evict([call], place)

    def tokens_until_it_acts(self, store: KVStore, codec: Codec | None) -> int | None:
        """Return after how many more generated tokens something happens to a layer, None for never.

        So many can be read at once as if they had come one by one. It is one token where each is watched, and what was seen
        is not held token by token.
        """
        steps = self.steps["decode"]
        watched = any(not wanted.by_token for wanted in self.watched["decode"])
        if watched or self.hooks["decode"] or any(step.hook is not None for step in steps):
            return 1
        found = [max(1, (step.schedule.every or 1) - store.since_eviction) for step in steps]
        if codec is not None:
            at = store.settled_at
            interval = codec.interval(store.device)
            found.append(1 if at is None else interval - (store.seen - at) % interval)
        return min(found, default=None)

    def after_pass(self, done: Pass) -> None:
        """Act on all layers of a pass of a phase that is followed."""
        hooks = self.hooks[done.phase]
        if hooks:
            for call in done.calls:
                call.keep_store(call.tokens.seen_before)
        for hook in (hook for hook in hooks if hook.first):
            hook.act(done)
        for place in range(self.waiting[done.phase], len(self.steps[done.phase])):
            step = self.steps[done.phase][place]
            if step.prepare is not None and _prepares(step, done.phase):
                step.prepare.act(done)
            if step.allocator.scope == "cache":
                self._evict(done.calls, place)
            else:
                for call in done.calls:
                    self._evict([call], place)
        for hook in (hook for hook in hooks if not hook.first):
            hook.act(done)

    def _evict(self, calls: Sequence[LayerCall], place: int) -> None:
        """Run one eviction on one layer, or on all together."""
        phase = calls[0].phase
        step = self.steps[phase][place]
        if step.hook is None:
            self._run(calls, step)
            return
        for call in calls:
            call.keep_store(call.tokens.seen_before)
            follow = partial(self._follow, call, step.inside)
            vars(call.layer.module).pop(MASKED, None)
            call.output = step.hook(call.layer.module, (), {**hook_arguments(call), FOLLOW: follow}, call.output)
            evict_masked(call)

    def _follow(self, call: LayerCall, steps: Sequence[Eviction]) -> None:
        for step in steps:
            if step.acts_in(call.phase):
                self._run([call], step)

    def _run(self, calls: Sequence[LayerCall], step: Eviction) -> None:
        phase: Phase = calls[0].phase if step.schedule.prompt else "decode"
        if step.among is not None:
            self._run_among(calls, step)
            return
        if phase == "decode" and not _is_due(calls[0], step):
            return
        for call in calls:
            call.keep_store()
        if step.compress is not None:
            for call in calls:
                replace_pairs(call, step.compress)
            return
        protected = self.recipe.protected
        free = partial(free_pairs, step, protected) if protected else None
        evict(calls, step, partial(self._mean, step, phase), free, self.recipe.codec_at)

    def _run_among(self, calls: Sequence[LayerCall], step: Eviction) -> None:
        """Evict from spans that have been closed since the last time."""
        rule = step.among
        assert rule is not None  # noqa: S101 - for type checkers
        warn_of_absent(rule, calls[0])
        if any(closed for call in calls for closed in new_spans(rule, call)):
            for call in calls:
                call.keep_store()
            free = partial(free_pairs, step, self.recipe.protected)
            evict(calls, step, partial(left_of_spans, step), free, self.recipe.codec_at)
            for call in calls:
                note_done(rule, call)

    def _mean(self, step: Eviction, phase: Phase, view: View, held: float, free: float) -> tuple[int, int]:
        """Return how many pairs per head a view is to keep on average, and of how many that earlier evictions left."""
        del held, free
        store, depth = view.call.store, view.call.layer.depth
        if phase == "prefill":
            unread = max(0, view.call.tokens.prompt_end - store.seen)
            tokens = view.call.left.get(view.rows[0], view.seen + unread)
            return step.amount.at(depth).beside(view).of(tokens), tokens
        amount = step.amount.at(depth)
        if step.schedule.target is not None:
            target = max(1, step.schedule.target.of(view.seen))
        elif amount.budget is not None:
            target = amount.budget
        else:
            target = store.targets[view.rows[0]] if store.targets else amount.of(view.seen - store.since_eviction)
        return target, view.seen


def _is_later_turn(call: LayerCall) -> bool:
    """Whether a pass ends a turn behind the prompt."""
    return call.phase == "prefill" and call.tokens.prompt_start > 0


def _is_due(call: LayerCall, step: Eviction) -> bool:
    """Whether an eviction of generated tokens follows a pass: after enough of them, or after a turn that fills the target."""
    if call.phase == "prefill":
        if not _is_later_turn(call):
            return False
        target = step.schedule.target
        if target is not None and call.store.seen - call.tokens.prompt_start >= max(1, target.of(call.store.seen)):
            return True
    return call.store.since_eviction >= (step.schedule.every or 0)


def _prepares(step: Eviction, phase: Phase) -> bool:
    return step.prepare is not None and phase in step.prepare.phases


def replace_pairs(call: LayerCall, compress: Compress, marked: bool = False) -> None:
    """Replace what a layer stores by what a user's `compress` returns; positions are found again by their values.

    Pairs that it marks on the module are evicted, and those that were `marked` before, where that is said.
    """
    store = call.store
    check_finite(store.window.filled_keys, store.window.filled_values, call.layer.index)
    if store.segments:
        raise ValueError("a press with its own `compress` cannot change pairs that a codec has already encoded")
    streams = store.batch * store.heads
    keys: list[Tensor] = [torch.empty(0)] * streams
    values, slots = list(keys), list(keys)
    changed = False
    for view in (view for group in view_groups(call) for view in group):
        if not marked:
            vars(call.layer.module).pop(MASKED, None)
        new_keys, new_values = compress(*score_arguments(view))
        stays = _take_masked(call.layer.module, new_keys)
        if new_keys.shape[:3] != new_values.shape[:3] or new_keys.shape[:2] != view.keys.shape[:2]:
            raise ValueError(
                f"compress returned keys {tuple(new_keys.shape)} and values {tuple(new_values.shape)} for keys "
                f"{tuple(view.keys.shape)}; batch and head counts must stay, lengths must agree"
            )
        if new_keys is not view.keys or new_values is not view.values:
            check_finite(new_keys, new_values, call.layer.index, "returned by `compress`")
        changed |= new_keys is not view.keys or new_values is not view.values or stays is not None
        left = new_keys.shape[2] if stays is None else int(stays.sum()) // (stays.shape[0] * stays.shape[1])
        if left != view.length:
            call.left.update(dict.fromkeys(view.rows, left))
        pads = store.seen - view.seen
        for place, n in enumerate(view.streams):
            i, j = divmod(place, new_keys.shape[1])
            own = slice(None) if stays is None else stays[i, j]
            keys[n], values[n] = new_keys[i, j][own], new_values[i, j][own]
            old = view.keys[i, j], view.values[i, j]
            found = positions_of((keys[n], values[n]), old, view.positions[i, j])
            slots[n] = torch.where(found >= 0, found + pads, found)
    if changed:
        seal_streams(store, keys, values, slots, call.tokens.mask)


def evict_masked(call: LayerCall) -> None:
    """Free the pairs that a user's hook has marked on the module of a layer."""
    if vars(call.layer.module).get(MASKED) is not None:
        replace_pairs(call, lambda module, hidden_states, keys, values, attentions, kwargs: (keys, values), marked=True)


def _take_masked(module: nn.Module, keys: Tensor) -> Tensor | None:
    """Take the marks of evicted pairs off a module; returns the mask `[b, h, n]` of those that stay, None for all.

    Raises:
        ValueError: the marks are no three index tensors, or refer to pairs that are not there.
    """
    marked = vars(module).pop(MASKED, None)
    if marked is None:
        return None
    stays = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
    try:
        rows, heads, pairs = (torch.as_tensor(index, device=keys.device) for index in marked)
        stays[rows, heads, pairs] = False
    except (IndexError, ValueError, TypeError) as error:
        raise ValueError(
            f"module.{MASKED} must be three index tensors (rows, heads, pairs) into keys {tuple(keys.shape[:3])}: {error}"
        ) from error
    return stays
