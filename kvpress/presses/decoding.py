# SPDX-License-Identifier: Apache-2.0
"""Schedules: compress while tokens are generated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import nn

from kvpress.core.amount import Amount, Schedule
from kvpress.core.checks import Count, Ratio
from kvpress.core.compose import protected_by
from kvpress.core.helpers import helper
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, Wrapping
from kvpress.core.recipe import Eviction, Recipe
from kvpress.core.registry import Refusal, register


def check_scores_generated(press: Wrapping, step: Eviction) -> None:
    """Raise TypeError where a press would judge generated tokens by scores that only a prompt has."""
    if step.prepare is not None:
        raise TypeError(
            f"{type(press.inner).__name__} scores by reading a prompt again, which generated tokens are not; "
            f"{type(press).__name__} needs a press that scores pairs, such as SnapKVPress"
        )


@register(
    "decoding",
    "schedule",
    example="decoding(snapkv):compression_interval=128,target_size=1024",
    refuses=(
        Refusal("decoding(kivi)", "a codec has no scores; it acts on generated tokens anyway"),
        Refusal("decoding(kvzip:0.5)", "it scores by reading a prompt again, which generated tokens are not"),
        Refusal("decoding(duo_attention:0.5,on_the_fly_scoring=true)", "it evicts while tokens are generated anyway"),
    ),
)
@dataclass
class DecodingPress(Wrapping):
    """Cut the cache down to `target_size` pairs per head every `compression_interval` generated tokens.

    `base_press` may be any scorer, head-wise ones included; how much it keeps by itself does not matter here. `target_ratio`
    sets the target as a fraction of the tokens seen instead: 0.75 removes three quarters. The prompt is not compressed: see
    `PrefillDecodingPress`. A later turn counts as one token, and is cut at once if it alone is as long as the target. A press
    that reads hidden states gets the newest `hidden_states_buffer_size` of them.

    Paper: none; a schedule.
    Differs from the paper: nothing.
    """

    base_press: BasePress
    compression_interval: Count = 512
    target_size: Count = 2048
    hidden_states_buffer_size: Count = 256
    target_ratio: Ratio | None = field(default=None, kw_only=True)

    @property
    def inner(self) -> BasePress:
        return self.base_press

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        check_scores_generated(self, step)
        if step.amount.ratios:
            raise TypeError(
                f"DecodingPress needs a press that scores pairs and leaves it to the target how many stay; the ratios of "
                f"{type(self.base_press).__name__} would have no effect"
            )
        target = Amount(budget=self.target_size) if self.target_ratio is None else Amount(self.target_ratio)
        schedule = Schedule(False, self.compression_interval, target, self.hidden_states_buffer_size)
        return replace(step, schedule=schedule)

    def after_block(self) -> None:
        self.reset()

    @helper
    def reset(self) -> None:
        """Do nothing: the state of a request lives in its cache. An override is called when a block is left."""


@register(
    "prefill_decoding",
    "schedule",
    example="prefill_decoding(snapkv:0.5; decoding(knorm):target_size=1024)",
    refuses=(
        Refusal("prefill_decoding(decoding_press=snapkv:0.5)", "the second press must act on generated tokens"),
        Refusal("prefill_decoding(kivi:bits=4)", "codecs and selectors have no phase; they are composed with `+`"),
    ),
)
@dataclass
class PrefillDecodingPress(BasePress):
    """Compress the prompt with one press and generated tokens with another.

    `prefilling_press` is one that evicts, `decoding_press` one that evicts while tokens are generated, such as
    `DecodingPress` or `H2OPress`. Either may be left out.

    Paper: none; a schedule.
    Differs from the paper: nothing.
    """

    prefilling_press: BasePress | None = None
    decoding_press: BasePress | None = None

    def validate(self) -> None:
        super().validate()
        for press in (self.prefilling_press, self.decoding_press):
            if press is not None:
                press.validate()
        self.recipe()

    def post_init_from_model(self, model: nn.Module) -> None:
        for press in (self.prefilling_press, self.decoding_press):
            if press is not None:
                press.post_init_from_model(model)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        parts = [self._part(self.prefilling_press, "prompt", model), self._part(self.decoding_press, "decoding", model)]
        evictions = tuple(step for part in parts for step in part.evictions)
        hooks = tuple(hook for part in parts for hook in part.hooks)
        observers = parts[0].observers + parts[1].observers
        return Recipe(evictions, observers=observers, hooks=hooks, protected=protected_by(parts))

    def _part(self, press: BasePress | None, phase: str, model: ModelFacts | None) -> Recipe:
        """Return what a press does in one phase."""
        if press is None:
            return Recipe()
        recipe, name = press.recipe(model), type(press).__name__
        if recipe.codec is not None or recipe.selector is not None:
            raise ValueError(
                f"{name} stores or chooses pairs at all times, not in one phase; compose it with the rest: "
                f"PrefillDecodingPress(...) + {name}(...)"
            )
        if phase == "prompt":
            steps = [
                replace(e, schedule=replace(e.schedule, every=None)) for e in recipe.evictions if e.schedule.prompt
            ]
        else:
            acting = [e for e in recipe.evictions if e.schedule.every is not None]
            if not acting:
                raise ValueError(
                    f"decoding_press must act while tokens are generated, got {name}; wrap it: DecodingPress({name}(...))"
                )
            steps = [replace(step, schedule=replace(step.schedule, prompt=False)) for step in acting]
        steps += [step for step in recipe.evictions if step.among is not None]  # in whatever phase their spans close
        return replace(recipe, evictions=tuple(steps))
