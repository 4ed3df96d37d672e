"""Schedules: compress while tokens are generated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import nn

from kvpress.checks import check_count, check_ratio
from kvpress.context import LayerCall, Phase
from kvpress.observe import HiddenStates
from kvpress.passes import Pass
from kvpress.presses.base import BasePress, Observers, ScorerPress
from kvpress.presses.evict import evict
from kvpress.registry import register


@register("decoding", "schedule")
@dataclass
class DecodingPress(BasePress):
    """Cut the cache down to `target_size` pairs per head every `compression_interval` generated tokens.

    `base_press` may be any scorer, head-wise ones included; how much it keeps by itself does not matter here. `target_ratio`
    sets the target as a fraction of the tokens seen instead: 0.75 removes three quarters. The prompt is not compressed: see
    `PrefillDecodingPress`. A press that reads hidden states gets the newest `hidden_states_buffer_size` of them.

    Paper: none; a schedule.
    Differs from the paper: nothing.
    """

    base_press: ScorerPress
    compression_interval: int = 512
    target_size: int = 2048
    hidden_states_buffer_size: int = 256
    target_ratio: float | None = None

    acts_in_decoding: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        if not hasattr(self.base_press, "keep"):
            raise TypeError(
                f"DecodingPress needs a press that scores pairs, such as SnapKVPress, got {type(self.base_press).__name__}"
            )
        self.base_press.validate()
        check_count("compression_interval", self.compression_interval)
        check_count("target_size", self.target_size)
        check_count("hidden_states_buffer_size", self.hidden_states_buffer_size)
        if self.target_ratio is not None:
            check_ratio("target_ratio", self.target_ratio)

    def observers(self) -> Observers:
        observers = dict(self.base_press.observers())
        if "hidden" in observers:
            observers["hidden"] = partial(HiddenStates, self.hidden_states_buffer_size)
        return observers

    def post_init_from_model(self, model: nn.Module) -> None:
        self.base_press.post_init_from_model(model)

    def after_decode(self, call: LayerCall) -> None:
        if call.store.since_eviction < self.compression_interval:
            return
        evict(call, self.base_press, lambda view: self._target(view.seen))

    def _target(self, seen: int) -> int:
        if self.target_ratio is not None:
            return max(1, int(seen * (1 - self.target_ratio)))
        return self.target_size


@register("prefill_decoding", "schedule")
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

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        for press in self._parts:
            press.validate()
            if press.encodes or press.selects:
                raise ValueError(
                    f"{type(press).__name__} stores or chooses pairs at all times, not in one phase; compose it with the rest: "
                    f"PrefillDecodingPress(...) + {type(press).__name__}(...)"
                )
        if self.decoding_press is not None and not self.decoding_press.acts_in_decoding:
            raise ValueError(
                f"decoding_press must act while tokens are generated, got {type(self.decoding_press).__name__}; wrap it: "
                f"DecodingPress({type(self.decoding_press).__name__}(...))"
            )

    @property
    def _parts(self) -> list[BasePress]:
        return [press for press in (self.prefilling_press, self.decoding_press) if press is not None]

    @property
    def acts_in_decoding(self) -> bool:  # type: ignore[override]
        """Whether a decoding press was given."""
        return self.decoding_press is not None

    def observers(self) -> Observers:
        from kvpress.presses.composed import union

        return union(press.observers() for press in self._parts)

    @property
    def is_head_wise(self) -> bool:  # type: ignore[override]
        """Whether heads of a layer may end up with different numbers of pairs."""
        return any(press.is_head_wise for press in self._parts)

    def decoding_observers(self) -> Observers:
        return {} if self.decoding_press is None else self.decoding_press.decoding_observers()

    def planned_pairs(self, tokens: int) -> int:
        return tokens if self.prefilling_press is None else self.prefilling_press.planned_pairs(tokens)

    def check_length(self, tokens: int) -> None:
        if self.prefilling_press is not None:
            self.prefilling_press.check_length(tokens)

    def post_init_from_model(self, model: Any) -> None:
        for press in self._parts:
            press.post_init_from_model(model)

    def after_prefill(self, call: LayerCall) -> None:
        if self.prefilling_press is not None:
            self.prefilling_press.after_prefill(call)

    def after_decode(self, call: LayerCall) -> None:
        if self.decoding_press is not None:
            self.decoding_press.after_decode(call)

    @property
    def follows(self) -> tuple[Phase, ...]:
        parts: list[tuple[BasePress | None, Phase]] = [
            (self.prefilling_press, "prefill"), (self.decoding_press, "decode"),
        ]  # fmt: skip
        return tuple(phase for press, phase in parts if press is not None and phase in press.follows)

    def after_pass(self, done: Pass) -> None:
        press = self.prefilling_press if done.phase == "prefill" else self.decoding_press
        if press is not None:
            press.after_pass(done)
