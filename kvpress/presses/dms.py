# SPDX-License-Identifier: Apache-2.0
"""Pairs below a threshold go, once they have left a window; how many that are follows from the text."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, inf

from kvpress.core.amount import Amount
from kvpress.core.checks import Count, Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, ScorerAround, WrapperPress, removed
from kvpress.core.recipe import Allocator, Eviction
from kvpress.core.registry import Exemption, Refusal, register
from kvpress.core.scoring import Scored
from kvpress.observe.view import View
from kvpress.presses.adakv import Competition
from kvpress.presses.decoding import check_scores_generated


@register(
    "dms",
    "budget",
    "Lancucki et al., 2025, arXiv:2506.05345",
    example="dms(keydiff:0.5):sliding_window_size=32",
    cases=("dms(keydiff):threshold=-0.1,sliding_window_size=6", "dms(snapkv:0.5,window_size=4):sliding_window_size=6"),
    refuses=(
        Refusal("dms(knorm)", "neither a threshold nor a ratio or budget says what goes"),
        Refusal(
            "dms(kvcompose:0.5):decoding=true",
            "it scores by reading a prompt again, and generated tokens are not read again",
        ),
        Refusal("adakv(dms(knorm:0.5))", "both would choose the pairs to keep"),
        Refusal(
            "decoding(dms(keydiff):threshold=0)", "the threshold says how many stay; `decoding=true` evicts of them"
        ),
    ),
    exempt=(
        Exemption("pairs per layer", "how many lie above a threshold depends on the text; compared with plain masks"),
    ),
)
@dataclass
class DMSPress(WrapperPress):
    """Evict the pairs that another press scores below `threshold`, once they have left the window of the newest tokens.

        pair t of a head stays   if score[t] >= threshold   or   t is one of the newest sliding_window_size tokens

    How much stays depends on the text, and differs between heads, layers and rows; `compression_ratio` says what it was.
    Thresholds want scores that mean the same in all texts, such as those of `kvzap`. Without a `threshold`, the ratio or
    budget of the inner press says how many pairs stay, and the heads of a layer compete for them; with one, the inner ratio or
    budget is not used, and a RuntimeWarning names it. `sliding_window_size` is the number of newest tokens that always stay,
    0 for none. With `decoding`, pairs are judged again every `interval` generated tokens: 1 evicts as soon as a pair leaves the
    window, more cost less time.

    Paper: Lancucki et al., Inference-Time Hyper-Scaling with KV Cache Compression, 2025, arXiv:2506.05345.
    Differs from the paper: nothing is trained, any scorer judges; the prompt is read with full attention. Unlike in NVIDIA
    kvpress, what is evicted is freed.
    """

    press: BasePress
    threshold: float | None = None
    sliding_window_size: Size = 128
    decoding: bool = False
    interval: Count = field(default=1, kw_only=True)

    def validate(self) -> None:
        given = self.threshold
        if given is not None and (isinstance(given, bool) or not isinstance(given, (int, float))):
            raise TypeError(f"threshold must be a finite number or None, got {given!r} of type {type(given).__name__}")
        if given is not None and not math.isfinite(given):
            raise ValueError(f"threshold must be a finite number or None, got {given}")
        super().validate()

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        self.check_choice(step)
        if self.decoding:
            check_scores_generated(self, step)
        name, told = type(self.press).__name__, not step.amount.keeps_all
        if self.threshold is not None and told and model is not None:
            warnings.warn(
                f"threshold={self.threshold} decides what DMSPress evicts; the ratio or budget of {name} is not used",
                RuntimeWarning,
                stacklevel=2,
            )
        if self.threshold is None and not told and model is not None and step.schedule.prompt:
            raise ValueError(
                f"nothing says what DMSPress evicts: give threshold=, or {name} a compression_ratio or budget"
            )
        allocator = Competition(step.allocator, scope=step.allocator.scope)
        return replace(
            step,
            scorer=BeforeWindow(step.scorer, self.sliding_window_size),
            allocator=allocator if self.threshold is None else AboveThreshold(float(self.threshold)),
            schedule=replace(step.schedule, every=self.interval) if self.decoding else step.schedule,
            amount=step.amount if self.threshold is None else Amount(),
            fixed=self.threshold is not None,
        )

    @property
    def compression_ratio(self) -> float:
        """Fraction of pairs that the inner press removes; with a threshold, the one that the last cache has lost."""
        return super().compression_ratio if self.threshold is None else removed(self)

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:
        if self.threshold is not None:
            raise AttributeError(
                f"compression_ratio cannot be set to {value}: threshold={self.threshold} says what is evicted; set threshold"
            )
        self.press.compression_ratio = value  # type: ignore[attr-defined]


@dataclass(frozen=True)
class BeforeWindow(ScorerAround):
    """The scores of another scorer, infinite for the newest `window` tokens and the first `sinks`."""

    window: int
    sinks: int = 0

    def scores(self, view: View) -> Tensor:
        safe = (view.positions >= view.seen - self.window) | (view.positions < self.sinks)
        return super().scores(view).masked_fill(safe, inf)


@dataclass(frozen=True)
class AboveThreshold(Allocator):
    """Leaves every head its pairs with a score of at least `threshold`."""

    threshold: float

    ragged = True
    decides = True

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        del mean
        return [(each.scores >= self.threshold).sum(dim=2) for each in scored]
