# SPDX-License-Identifier: Apache-2.0
"""Schedules: compress while tokens are generated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import nn

from kvpress.core.amount import Amount, Schedule
from kvpress.core.checks import Count, Ratio
from kvpress.core.compose import protected_by
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, Wrapping
from kvpress.core.recipe import Eviction, Recipe
from kvpress.core.registry import Refusal, register


def check_scores_generated(press: Wrapping, step: Eviction) -> None:
    """Raise TypeError for a press that scores by reading a prompt again, since generated tokens are not read again."""
    if step.prepare is not None:
        raise TypeError(
            f"{type(press.inner).__name__} scores by reading a prompt again, and generated tokens are not read again; "
            f"{type(press).__name__} needs a press that scores pairs, such as SnapKVPress"
        )


@register(
    "decoding",
    "schedule",
    example="decoding(snapkv):compression_interval=128,target_size=1024",
    refuses=(
        Refusal("decoding(kivi)", "a codec has no scores; it acts on generated tokens anyway"),
        Refusal("decoding(kvzip:0.5)", "it scores by reading a prompt again, and generated tokens are not read again"),
        Refusal("decoding(duo_attention:0.5,on_the_fly_scoring=true)", "it evicts while tokens are generated anyway"),
        Refusal("decoding(bounded(snapkv))", "it does not evict from prompts, so chunks would have no effect"),
        Refusal("decoding(conversation(snapkv))", "both would set the number of pairs; use one of them"),
    ),
    status="reproduction",
)
@dataclass
class DecodingPress(Wrapping):
    """Cut the cache down to `target_size` pairs per head every `compression_interval` generated tokens.

    `base_press` is any scorer, also one with head budgets; its own ratio, budget and interval have no effect. `target_size`
    is the number of pairs that a head keeps after an eviction, and `compression_interval` is the number of generated tokens
    between two evictions. `target_ratio` sets the target as a compression ratio of the tokens seen instead: 0.75 removes
    three quarters. The prompt is not compressed: see `PrefillDecodingPress`. A later turn counts as one token, and rows are
    cut at once where it alone is as long as their target. A press that reads hidden states gets the newest
    `hidden_states_buffer_size` of them.

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
        name = type(self.base_press).__name__
        if step.schedule.target is not None:
            raise TypeError(
                f"{type(self).__name__} sets the target, so that of {name} would have no effect: pass its inner press"
            )
        if step.schedule.chunk is not None:
            raise TypeError(
                f"{type(self).__name__} keeps prompts whole, so the chunks of {name} would have no effect: pass its inner "
                f"press, or use ConversationPress({name}(...))"
            )
        if step.amount.ratios:
            raise TypeError(
                f"DecodingPress sets the number of pairs by its target, so the ratios of {name} "
                f"would have no effect; use a press that scores pairs, such as SnapKVPress"
            )
        target = Amount(budget=self.target_size) if self.target_ratio is None else Amount(self.target_ratio)
        schedule = Schedule(False, self.compression_interval, target, self.hidden_states_buffer_size)
        return replace(step, schedule=schedule)

    def after_block(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Do nothing, because a cache holds its own state; an override is called at the end of a session."""


@register(
    "prefill_decoding",
    "schedule",
    example="prefill_decoding(snapkv:0.5; decoding(knorm):target_size=1024)",
    refuses=(
        Refusal("prefill_decoding(decoding_press=snapkv:0.5)", "the second press must act on generated tokens"),
        Refusal("prefill_decoding(kivi:bits=4)", "codecs and selectors have no phase; they are composed with `+`"),
    ),
    status="recommended",
)
@dataclass
class PrefillDecodingPress(BasePress):
    """Compress the prompt with one press and generated tokens with another.

    `prefilling_press` evicts pairs of the prompt; `decoding_press` evicts while tokens are generated, such as `DecodingPress`
    or `H2OPress`. Each of them may be None.

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
        recipes = [
            self._phase(self.prefilling_press, "prompt", model),
            self._phase(self.decoding_press, "decoding", model),
        ]
        evictions = tuple(step for recipe in recipes for step in recipe.evictions)
        hooks = tuple(hook for recipe in recipes for hook in recipe.hooks)
        observers = recipes[0].observers + recipes[1].observers
        return replace(
            recipes[0], evictions=evictions, observers=observers, hooks=hooks, protected=protected_by(recipes)
        )

    def _phase(self, press: BasePress | None, phase: str, model: ModelFacts | None) -> Recipe:
        """Return the recipe of a press, with its evictions limited to one phase, "prompt" or "decoding"."""
        if press is None:
            return Recipe()
        recipe, name = press.recipe(model), type(press).__name__
        if recipe.codec is not None or recipe.selector is not None:
            raise ValueError(
                f"{name} has a codec or selector, which act in both phases; compose it instead: "
                f"PrefillDecodingPress(...) + {name}(...)"
            )
        if phase == "prompt":
            steps = [
                replace(e, schedule=replace(e.schedule, every=None)) for e in recipe.evictions if e.schedule.prompt
            ]
        else:
            if recipe.pattern is not None or recipe.dropping is not None:
                raise ValueError(
                    f"{name} has a part that reads prompts with a pattern or drops their tokens, and decoding_press acts while "
                    "tokens are generated: give that part to prefilling_press, or compose it with `+`"
                )
            steps = [e for e in recipe.evictions if e.schedule.every is not None]
            if not steps:
                raise ValueError(
                    f"decoding_press must act while tokens are generated, got {name}; wrap it: DecodingPress({name}(...))"
                )
            steps = [replace(step, schedule=replace(step.schedule, prompt=False)) for step in steps]
        steps += [step for step in recipe.evictions if step.among is not None]  # spans are evicted in both phases
        return replace(recipe, evictions=tuple(steps))
