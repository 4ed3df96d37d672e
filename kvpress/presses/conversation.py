# SPDX-License-Identifier: Apache-2.0
"""One budget for a whole conversation: prompts, later turns and answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvpress.core.amount import Amount, Schedule
from kvpress.core.checks import Count
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, Wrapping
from kvpress.core.recipe import Eviction
from kvpress.core.registry import Exemption, Refusal, register


@register(
    "conversation",
    "schedule",
    example="conversation(snapkv):budget=256",
    exempt=(Exemption("fuzz", "its schedule is that of `prefill_decoding` with one budget, which is drawn"),),
    refuses=(
        Refusal(
            "conversation(snapkv:0.5):budget=1024", "its budget sets the number of pairs; a ratio would have no effect"
        ),
        Refusal(
            "conversation(kvzip):budget=1024",
            "it scores by reading a prompt again, and generated tokens are not read again",
        ),
        Refusal("conversation(kivi):budget=1024", "a codec has no scores; compose it: conversation(snapkv) + kivi"),
    ),
    status="recommended",
)
@dataclass
class ConversationPress(Wrapping):
    """Cut the cache down to `budget` pairs per head after every turn, and every `interval` tokens of an answer.

    All stored pairs compete, so memory does not grow with the number of turns: a layer never holds more than `budget` pairs
    and the longest turn, or `interval` tokens if that is more. Around `BoundedPress`, turns are read in chunks. `press` is any
    scorer without a ratio or budget of its own. Use `ProtectPress` for tokens that must always stay, such as the system prompt.

    Paper: none; a schedule.
    Differs from the paper: nothing.
    """

    press: BasePress
    budget: Count = 4096
    interval: Count = 128

    @property
    def inner(self) -> BasePress:
        return self.press

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        name = type(self.press).__name__
        if step.prepare is not None:
            raise TypeError(
                f"{name} scores by reading a prompt again, and generated tokens are not read again; ConversationPress needs a "
                "press that scores pairs, such as SnapKVPress"
            )
        if not step.amount.keeps_all or step.schedule.target is not None:
            raise ValueError(
                f"ConversationPress keeps budget={self.budget} pairs, so the ratio, budget or target of {name} would have no "
                f"effect: leave it out"
            )
        budget = Amount(budget=self.budget)
        schedule = Schedule(True, self.interval, budget, step.schedule.hidden_states, step.schedule.chunk)
        return replace(step, amount=replace(step.amount, budget=self.budget), schedule=schedule)
