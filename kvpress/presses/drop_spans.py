# SPDX-License-Identifier: Apache-2.0
"""Eviction of the tokens between two tags, such as thoughts or tool outputs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvpress.core.amount import Amount, Schedule
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, Wrapping
from kvpress.core.recipe import Eviction, Recipe
from kvpress.core.registry import Exemption, Refusal, register
from kvpress.core.scoring import ByScore
from kvpress.observe.view import View
from kvpress.presses.protect import between, vocabulary_of


@dataclass(frozen=True)
class NoneBetter(ByScore):
    """Scorer with equal scores for all pairs."""

    def scores(self, view: View) -> Tensor:
        """Return zeros."""
        return torch.zeros(view.shape, device=view.positions.device)


@register(
    "drop_spans",
    "schedule",
    example="drop_spans:<think>,</think>",
    exempt=(Exemption("fuzz", "random ids hold no tags; its own tests read spans in prompts, turns and answers"),),
    refuses=(
        Refusal("drop_spans:<think>,<think>", "an opening and a closing tag must differ"),
        Refusal("drop_spans(kvzip:0.5)", "it scores by reading a whole prompt again"),
        Refusal("drop_spans(snapkv)", "it would keep everything between the tags"),
        Refusal("decoding(drop_spans)", "it has its own schedule, the end of a span"),
        Refusal("drop_spans(bounded(snapkv:0.5))", "spans are compressed whole, so chunks would have no effect"),
        Refusal("drop_spans(kivi)", "a codec stores all pairs; compose it: drop_spans + kivi"),
    ),
)
@dataclass
class DropSpansPress(Wrapping):
    """Evict the span between two tags, such as a thought, in the pass that reads the closing tag.

    `opening` and `closing` are the tags. The tags stay, and all other tokens keep their positions. With a `press`, any scorer,
    spans are compressed by its ratio or budget instead; spans that close in one pass are compressed together. Each span is
    compressed once, in prompts and while tokens are generated. An opening tag inside a span belongs to the span, a closing tag
    outside a span is text, and a span without a closing tag stays. `tokenizer` encodes the tags, which are matched with the ids
    of all tokens; without it, the tokenizer in the model's folder does. Spans protected by `ProtectPress` stay.

    Paper: none; a rule for choosing pairs.
    Differs from the paper: nothing.
    """

    opening: str = "<think>"
    closing: str = "</think>"
    press: BasePress | None = None
    tokenizer: Any = field(default=None, kw_only=True, compare=False, repr=False)

    @property
    def inner(self) -> BasePress:
        return self if self.press is None else self.press

    def validate(self) -> None:
        if self.press is not None:
            super().validate()
            return
        self.recipe()

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if self.press is not None:
            return super().recipe(model)
        return Recipe((self._closing(Eviction(NoneBetter(), Amount(budget=0)), model),))

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        name = type(self.inner).__name__
        if step.prepare is not None:
            raise TypeError(f"DropSpansPress cannot cut spans by {name}, which scores by reading a whole prompt again")
        if step.schedule.target is not None or step.among is not None:
            raise TypeError(
                f"DropSpansPress evicts at the end of a span, so {name} cannot set the time: pass its inner press"
            )
        if step.schedule.chunk is not None:
            raise TypeError(
                f"DropSpansPress evicts at the end of a span, so the chunks of {name} would have no effect: pass its inner "
                "press"
            )
        if step.is_identity:
            raise ValueError(
                f"{name} keeps all pairs between the tags: set its ratio or budget, or leave it out to drop whole spans"
            )
        return self._closing(step, model)

    def _closing(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        vocabulary = vocabulary_of(self.tokenizer, model, "drop_spans")
        spans = between(self.opening, self.closing, vocabulary, whole=False, closed=True)
        schedule = Schedule(False, hidden_states=step.schedule.hidden_states, closing=True)
        amount = replace(step.amount, protected=0)
        return replace(step, amount=amount, schedule=schedule, among=spans, recent=0.0, fixed=True)

    def post_init_from_model(self, model: Any) -> None:
        if self.press is not None:
            self.press.post_init_from_model(model)
