# SPDX-License-Identifier: Apache-2.0
"""Executor of recipes: evicts after layers and passes, as the fields of each eviction describe."""

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
"""Keyword argument of a user's `forward_hook` that holds the evictions its base class runs."""
MASKED = "masked_key_indices"
"""Attribute of a module in which presses written for NVIDIA kvpress store the (rows, heads, pairs) of evicted pairs."""


class Executor:
    """Runs a recipe on the layers of a cache; holds no state of a request.

    An eviction runs at the end of a pass if it reads all layers, if an earlier eviction of the pass does, or if a hook comes
    first. Every other eviction runs right after its layer, so that memory is free before the next layer needs it. With
    `evicts=False`, nothing is evicted after a prompt.
    """

    def __init__(self, recipe: Recipe, evicts: bool = True) -> None:
        self.recipe = recipe
        self.evicts = evicts
        self.hooks = {phase: self._hooks(phase) for phase in ("prefill", "decode")}
        self.steps = {phase: self._acting(phase) for phase in ("prefill", "decode")}
        self.waiting = {phase: self._first_to_wait(phase) for phase in ("prefill", "decode")}
        self.chunk = recipe.chunk if evicts else None
        """Most tokens of a prompt that may be read in one pass; None without a limit."""
        self._follows = {
            phase: bool(self.hooks[phase]) or self.waiting[phase] < len(self.steps[phase]) for phase in self.steps
        }
        self.watched = {
            "prefill": recipe.watched("prefill" if evicts else "decode"),
            "decode": recipe.watched("decode"),
        }

    def _hooks(self, phase: Phase) -> list[PassHook]:
        acts = self.evicts or phase == "decode"
        return [hook for hook in self.recipe.hooks if acts and phase in hook.phases]

    def _acting(self, phase: Phase) -> tuple[Eviction, ...]:
        """Return the evictions of a phase; later turns also run the evictions of generated tokens."""
        if phase == "decode":
            return self.recipe.acting(phase)
        return tuple(
            step
            for step in self.recipe.evictions
            if (self.evicts and step.acts_in(phase)) or (step.acts_in("decode") and not step.schedule.prompt)
        )

    def _first_to_wait(self, phase: Phase) -> int:
        """Return the index of the first eviction of a phase that runs at the end of the pass."""
        if any(hook.first for hook in self.hooks[phase]):
            return 0
        waits = [step.allocator.scope == "cache" or _prepares(step, phase) for step in self.steps[phase]]
        return waits.index(True) if True in waits else len(waits)

    def check(self) -> None:
        """Call `check` of all hooks, so that a hook that cannot act raises before any work."""
        prepared = [step.prepare for steps in self.steps.values() for step in steps]
        for hook in (*prepared, *(hook for hooks in self.hooks.values() for hook in hooks)):
            if hook is not None:
                hook.check()

    def follows(self, phase: Phase) -> bool:
        """Whether anything runs at the end of a pass of a phase."""
        return self._follows[phase]

    def after_layer(self, call: LayerCall) -> None:
        """Evict from a layer whose tokens of the pass are stored."""
        store = call.store
        if call.phase == "decode":
            store.count_generated(store.seen - call.tokens.seen_before)
        elif _ends_later_turn(call):
            if self.steps["decode"]:
                call.keep_store(call.tokens.seen_before)
            store.count_generated(1)
        for index in range(self.waiting[call.phase]):
            self._evict([call], index)

    def after_chunk(self, call: LayerCall) -> None:
        """Evict from a layer in the middle of a prompt, if the number of unread tokens is a multiple of `chunk`."""
        if self.chunk is None or (call.tokens.prompt_end - call.store.seen) % self.chunk:
            return
        for index, step in enumerate(self.steps["prefill"]):
            if step.schedule.chunk is not None:
                self._evict([call], index)

    def tokens_until_it_acts(self, store: KVStore, codec: Codec | None) -> int | None:
        """Return the number of generated tokens until the next eviction or encoding of a layer; None for never.

        Reading that many tokens in one pass gives the same cache as reading them one by one. The number is 1 if an observer
        does not record its tokens separately.
        """
        steps = self.steps["decode"]
        watched = any(not item.by_token for item in self.watched["decode"])
        if watched or self.hooks["decode"] or any(step.hook is not None for step in steps):
            return 1
        intervals = [max(1, (step.schedule.every or 1) - max(store.since_eviction)) for step in steps]
        if codec is not None:
            interval = codec.interval(store.device)
            since = [interval - 1] if store.settled_at is None else store.tokens_since_settled()
            intervals.append(interval - max(tokens % interval for tokens in since))
        return min(intervals, default=None)

    def after_pass(self, done: Pass) -> None:
        """Run hooks and the evictions of all layers at the end of a pass."""
        hooks = self.hooks[done.phase]
        if hooks:
            for call in done.calls:
                call.keep_store(call.tokens.seen_before)
        for hook in (hook for hook in hooks if hook.first):
            hook.act(done)
        for index in range(self.waiting[done.phase], len(self.steps[done.phase])):
            step = self.steps[done.phase][index]
            if step.prepare is not None and _prepares(step, done.phase):
                step.prepare.act(done)
            if step.allocator.scope == "cache":
                self._evict(done.calls, index)
            else:
                for call in done.calls:
                    self._evict([call], index)
        for hook in (hook for hook in hooks if not hook.first):
            hook.act(done)

    def _evict(self, calls: Sequence[LayerCall], index: int) -> None:
        """Run eviction number `index` of the phase on one layer, or on all layers together."""
        phase = calls[0].phase
        step = self.steps[phase][index]
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
        rows = _due_rows(calls[0], step) if phase == "decode" else list(range(calls[0].store.batch))
        if not rows:
            return
        for call in calls:
            call.keep_store()
        if step.compress is not None:
            for call in calls:
                replace_pairs(call, step.compress, rows)
            return
        protected = self.recipe.protected
        free = partial(free_pairs, step, protected) if protected else None
        evict(calls, step, partial(self._mean, step, phase), free, self.recipe.codec_at, rows)

    def _run_among(self, calls: Sequence[LayerCall], step: Eviction) -> None:
        """Evict from spans that were closed since the last call."""
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

    def _mean(self, step: Eviction, phase: Phase, view: View, length: float, free: float) -> tuple[int, int]:
        """Return the number of pairs per head that a view keeps on average, and the number that it is a part of."""
        del length, free
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
            row = view.rows[0]
            last_target = store.targets[row]
            left = amount.of(view.seen - store.since_eviction[row]) if last_target is None else last_target
            target = amount.while_generating(view, left)
        return target, view.seen


def _ends_later_turn(call: LayerCall) -> bool:
    """Whether a pass ends a turn that follows the first prompt; chunks of a prompt, though compressed as turns, are one."""
    start, end = call.tokens.around_chunk or (call.tokens.prompt_start, 0)
    return call.phase == "prefill" and start > 0 and call.store.seen >= end


def _due_rows(call: LayerCall, step: Eviction) -> list[int]:
    """Return the rows from which generated tokens are evicted now.

    A row is due every `every` tokens, and after a turn that alone is as long as its target. Padding does not count.
    """
    store, target = call.store, step.schedule.target
    if call.phase == "prefill" and not _ends_later_turn(call):
        return []
    is_due = [count >= (step.schedule.every or 0) for count in store.since_eviction]
    if call.phase == "prefill" and target is not None:
        start, _ = call.tokens.around_chunk or (call.tokens.prompt_start, 0)
        seen, new = _real_tokens(call, 0), _real_tokens(call, start)
        is_due = [due or n >= max(1, target.of(m)) for due, n, m in zip(is_due, new, seen, strict=True)]
    return [row for row, due in enumerate(is_due) if due]


def _real_tokens(call: LayerCall, start: int) -> list[int]:
    """Return the number of real tokens of each row from token number `start` on."""
    if call.tokens.mask is None:
        return [call.store.seen - start] * call.store.batch
    counts: list[int] = call.tokens.mask[:, start:].sum(dim=1).tolist()
    return counts


def _prepares(step: Eviction, phase: Phase) -> bool:
    return step.prepare is not None and phase in step.prepare.phases


def replace_pairs(call: LayerCall, compress: Compress, rows: Sequence[int], marked: bool = False) -> None:
    """Replace the pairs of some rows of a layer by those that a user's `compress` returns; their values identify the positions.

    Pairs that `compress` marks on the module are evicted. With `marked`, marks from before the call count too.

    Raises:
        ValueError: a codec has encoded pairs already, or shapes of the returned tensors do not fit.
    """
    store = call.store
    check_finite(store.window.filled_keys, store.window.filled_values, call.layer.index)
    if store.segments:
        raise ValueError("a press with its own `compress` cannot change pairs that a codec has encoded")
    streams = store.batch * store.heads
    keys: list[Tensor] = [torch.empty(0)] * streams
    values, slots = list(keys), list(keys)
    changed: list[int] = []
    unchanged = [row for row in range(store.batch) if row not in rows]
    for view in (view for group in view_groups(call, rows=unchanged) for view in group):
        flat = [array.flatten(0, 1) for array in (view.keys, view.values, view.slots(view.positions))]
        for n, *pairs in zip(view.streams, *flat, strict=True):
            keys[n], values[n], slots[n] = pairs
    for view in (view for group in view_groups(call, rows=rows) for view in group):
        if not marked:
            vars(call.layer.module).pop(MASKED, None)
        new_keys, new_values = compress(*score_arguments(view))
        stays = _take_masked(call.layer.module, new_keys)
        if new_keys.shape[:3] != new_values.shape[:3] or new_keys.shape[:2] != view.keys.shape[:2]:
            raise ValueError(
                f"compress returned keys {tuple(new_keys.shape)} and values {tuple(new_values.shape)} for keys "
                f"{tuple(view.keys.shape)}: return the same rows and heads, and as many values as keys"
            )
        if new_keys is not view.keys or new_values is not view.values:
            check_finite(new_keys, new_values, call.layer.index, "returned by `compress`")
        if new_keys is not view.keys or new_values is not view.values or stays is not None:
            changed += view.rows
        length = new_keys.shape[2] if stays is None else int(stays.sum()) // (stays.shape[0] * stays.shape[1])
        if length != view.length:
            call.left.update(dict.fromkeys(view.rows, length))
        all_slots = view.slots(torch.arange(view.seen, device=view.device).expand(len(view.rows), 1, -1))[:, 0]
        for index, n in enumerate(view.streams):
            i, j = divmod(index, new_keys.shape[1])
            kept = slice(None) if stays is None else stays[i, j]
            keys[n], values[n] = new_keys[i, j][kept], new_values[i, j][kept]
            old = view.keys[i, j], view.values[i, j]
            positions = positions_of((keys[n], values[n]), old, view.positions[i, j])
            slots[n] = torch.where(positions >= 0, all_slots[i, positions], positions)
    if changed:
        seal_streams(store, keys, values, slots, call.tokens.mask)
        store.restart_count(changed)


def evict_masked(call: LayerCall) -> None:
    """Evict the pairs that a user's hook has marked on the module of a layer."""
    if vars(call.layer.module).get(MASKED) is not None:
        rows = range(call.store.batch)
        replace_pairs(call, lambda module, hidden, keys, values, attentions, kwargs: (keys, values), rows, marked=True)


def _take_masked(module: nn.Module, keys: Tensor) -> Tensor | None:
    """Remove the marks of evicted pairs from a module; return the mask `[b, h, n]` of kept pairs, None for all.

    Raises:
        ValueError: the marks are not three index tensors, or an index is out of range.
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
