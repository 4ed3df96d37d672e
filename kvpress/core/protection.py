# SPDX-License-Identifier: Apache-2.0
"""Span rules of evictions: pairs that are protected, and evictions from spans only."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress.core.recipe import Eviction
from kvpress.observe.call import LayerCall
from kvpress.observe.spans import SPANS, Span, SpanRule, inside, spans_in
from kvpress.observe.view import View

WARNED = "protected spans"
"""Key of the shared state of a cache; set once the warning about too many protected pairs was issued."""


def new_spans(rule: SpanRule, call: LayerCall) -> list[list[Span]]:
    """Return the spans of every row that no eviction has used yet."""
    done = call.store.observers[SPANS].done.get(rule.key, [0] * call.store.batch)
    return [[span for span in spans if span[1] > end] for spans, end in zip(spans_in(rule, call), done, strict=True)]


def note_done(rule: SpanRule, call: LayerCall) -> None:
    """Record that an eviction has used all spans found so far."""
    ends = [max((end for _, end in spans), default=0) for spans in spans_in(rule, call)]
    tracker = call.store.observers[SPANS]
    tracker.done = {**tracker.done, rule.key: ends}


def free_pairs(step: Eviction, protected: Sequence[SpanRule], view: View) -> Tensor:
    """Return the mask `[b, h, n]` of the pairs that an eviction may remove: unprotected ones, in its spans if it has any."""

    def marked(spans: Sequence[Sequence[Span]]) -> Tensor:
        return inside([spans[row] for row in view.rows], view.seen, view.positions)

    free = torch.ones(view.shape, dtype=torch.bool, device=view.positions.device)
    if step.among is not None:
        free &= marked(new_spans(step.among, view.call))
    for rule in protected:
        free &= ~marked(spans_in(rule, view.call))
    return free


def warn_of_absent(rule: SpanRule, call: LayerCall) -> None:
    """Warn, once per cache, if a first prompt has no span of a rule that expects some."""
    if (
        rule.absent is None
        or not call.is_first_prompt
        or rule.absent in call.tokens.shared
        or any(spans_in(rule, call))
    ):
        return
    call.tokens.shared[rule.absent] = True
    warnings.warn(rule.absent, RuntimeWarning, stacklevel=2)


def left_of_spans(step: Eviction, view: View, stored: float, free: float) -> tuple[int, int]:
    """Return the target of an eviction from spans, in pairs per head, and the number that it is a part of.

    The amount applies to the `free` pairs only; the target counts all `stored` pairs that stay.
    """
    evicted = round(free) - step.amount.at(view.call.layer.depth).of(round(free))
    return round(stored) - evicted, view.seen


def warn(call: LayerCall, settled: int, mean: int) -> None:
    """Warn, once per cache, that protected pairs exceed the number of pairs that should stay."""
    if WARNED in call.tokens.shared:
        return
    call.tokens.shared[WARNED] = True
    warnings.warn(
        f"protected spans and the newest pairs are {settled} pairs per head, more than the {mean} that should stay: they are "
        "kept, and all other pairs are evicted; raise the budget, lower compression_ratio, or protect less",
        RuntimeWarning,
        stacklevel=2,
    )
