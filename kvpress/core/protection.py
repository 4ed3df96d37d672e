# SPDX-License-Identifier: Apache-2.0
"""Which pairs an eviction may take, where spans are protected or are all that it takes from."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress.core.recipe import Eviction
from kvpress.observe.call import LayerCall
from kvpress.observe.spans import SPANS, Span, Spans, inside, spans_in
from kvpress.observe.view import View

WARNED = "protected spans"
"""What layers have in common once it was said that protected pairs are more than may stay."""


def new_spans(rule: Spans, call: LayerCall) -> list[list[Span]]:
    """Return the spans of every row that nothing has been taken from yet."""
    done = call.store.observers[SPANS].done.get(rule.key, [0] * call.store.batch)
    return [
        [span for span in spans if span[1] > known] for spans, known in zip(spans_in(rule, call), done, strict=True)
    ]


def note_done(rule: Spans, call: LayerCall) -> None:
    """Remember that all spans there are have been taken from."""
    ends = [max((end for _, end in spans), default=0) for spans in spans_in(rule, call)]
    tracker = call.store.observers[SPANS]
    tracker.done = {**tracker.done, rule.key: ends}


def free_pairs(step: Eviction, protected: Sequence[Spans], view: View) -> Tensor:
    """Mark the pairs `[b, h, n]` of a view that an eviction may take: none that is protected, or outside of its spans."""

    def marked(spans: Sequence[Sequence[Span]]) -> Tensor:
        return inside([spans[row] for row in view.rows], view.seen, view.positions)

    free = torch.ones(view.shape, dtype=torch.bool, device=view.positions.device)
    if step.among is not None:
        free &= marked(new_spans(step.among, view.call))
    for rule in protected:
        free &= ~marked(spans_in(rule, view.call))
    return free


def warn_of_absent(rule: Spans, call: LayerCall) -> None:
    """Say, once for a cache, that its first prompt has no spans of a rule that is about some."""
    if (
        rule.absent is None
        or not call.is_first_prompt
        or rule.absent in call.tokens.shared
        or any(spans_in(rule, call))
    ):
        return
    call.tokens.shared[rule.absent] = True
    warnings.warn(rule.absent, RuntimeWarning, stacklevel=2)


def left_of_spans(step: Eviction, view: View, held: float, free: float) -> tuple[int, int]:
    """Return how many of the pairs `held` per head stay where an eviction takes from the `free` ones, and of how many."""
    taken = round(free) - step.amount.at(view.call.layer.depth).of(round(free))
    return round(held) - taken, view.seen


def warn(call: LayerCall, settled: int, mean: int) -> None:
    """Say, once for a cache, that protected pairs are more than may stay."""
    if WARNED in call.tokens.shared:
        return
    call.tokens.shared[WARNED] = True
    warnings.warn(
        f"protected spans and the newest pairs are {settled} pairs per head, more than the {mean} that are to stay: they stay "
        "all the same, and everything else goes; raise the budget, lower compression_ratio, or protect less",
        RuntimeWarning,
        stacklevel=2,
    )
