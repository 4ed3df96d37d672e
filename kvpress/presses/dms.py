# SPDX-License-Identifier: Apache-2.0
"""Eviction below a score threshold, after a window of the newest tokens."""

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
        Refusal("dms(knorm)", "it needs a threshold, or an inner press with a ratio or budget"),
        Refusal(
            "dms(kvcompose:0.5):decoding=true",
            "it scores by reading a prompt again, and generated tokens are not read again",
        ),
        Refusal("adakv(dms(knorm:0.5))", "both would choose the pairs to keep"),
        Refusal(
            "decoding(dms(keydiff):threshold=0)", "the threshold sets the number of pairs; use `decoding=true` instead"
        ),
    ),
    exempt=(
        Exemption("pairs per layer", "how many lie above a threshold depends on the text; compared with plain masks"),
    ),
)
@dataclass
class DMSPress(WrapperPress):
    """Evict pairs outside the window of the newest tokens that another press scores below `threshold`.

        pair t of a head stays   if score[t] >= threshold   or   t is one of the newest sliding_window_size tokens

    The number of pairs that stay depends on the text, and differs between heads, layers and rows; `compression_ratio` is the
    measured ratio. A threshold needs scores that are comparable between texts, such as those of `kvzap`. Without a `threshold`,
    the ratio or budget of the inner press sets the number of pairs, and the heads of a layer compete for them. With a
    `threshold`, the inner ratio or budget is not used, and a RuntimeWarning names the press. The newest `sliding_window_size`
    tokens always stay, 0 for none; without a `threshold`, only as many of them as the budget allows in prompts that are
    longer than the window. With `decoding`, pairs are compared again every `interval` generated tokens: 1 evicts a pair
    as soon as it leaves the window, and higher values take less time.

    Paper: Lancucki et al., Inference-Time Hyper-Scaling with KV Cache Compression, 2025, arXiv:2506.05345.
    Differs from the paper: nothing is trained, and any scorer may be used; the prompt is read with full attention. Unlike in
    NVIDIA kvpress, evicted pairs are freed.
    """

    press: BasePress
    threshold: float | None = None
    sliding_window_size: Size = 128
    decoding: bool = False
    interval: Count = field(default=1, kw_only=True)

    def validate(self) -> None:
        value = self.threshold
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise TypeError(f"threshold must be a finite number or None, got {value!r} of type {type(value).__name__}")
        if value is not None and not math.isfinite(value):
            raise ValueError(f"threshold must be a finite number or None, got {value}")
        super().validate()

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        self.check_choice(step)
        if self.decoding:
            check_scores_generated(self, step)
        name, has_amount = type(self.press).__name__, not step.amount.keeps_all
        if self.threshold is not None and has_amount and model is not None:
            warnings.warn(
                f"threshold={self.threshold} decides what DMSPress evicts; the ratio or budget of {name} is not used",
                RuntimeWarning,
                stacklevel=2,
            )
        if self.threshold is None and not has_amount and model is not None and step.schedule.prompt:
            raise ValueError(
                f"DMSPress would evict nothing: set threshold=, or a compression_ratio or budget of {name}"
            )
        allocator = Competition(step.allocator, scope=step.allocator.scope)
        amount = replace(step.amount, protected=max(step.amount.protected, self.sliding_window_size))
        return replace(
            step,
            scorer=BeforeWindow(step.scorer, self.sliding_window_size),
            allocator=allocator if self.threshold is None else AboveThreshold(float(self.threshold)),
            schedule=replace(step.schedule, every=self.interval) if self.decoding else step.schedule,
            amount=amount if self.threshold is None else Amount(),
            fixed=self.threshold is not None,
        )

    @property
    def compression_ratio(self) -> float:
        """Ratio of the inner press; with a threshold, the measured ratio of the last cache."""
        return super().compression_ratio if self.threshold is None else removed(self)

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:
        if self.threshold is not None:
            raise AttributeError(
                f"compression_ratio cannot be set to {value}, because threshold={self.threshold} decides; set threshold instead"
            )
        self.press.compression_ratio = value  # type: ignore[attr-defined]


@dataclass(frozen=True)
class BeforeWindow(ScorerAround):
    """Scorer with the scores of another one, infinite for the newest tokens and the sinks."""

    window: int
    """Number of newest tokens."""
    sinks: int = 0
    """Number of sinks."""

    def scores(self, view: View) -> Tensor:
        protected = (view.positions >= view.seen - self.window) | (view.positions < self.sinks)
        return super().scores(view).masked_fill(protected, inf)


@dataclass(frozen=True)
class AboveThreshold(Allocator):
    """Allocator that keeps the pairs with a score of at least `threshold`."""

    threshold: float

    ragged = True
    decides = True
    by_head = True

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        del mean
        return [(item.scores >= self.threshold).sum(dim=2) for item in scored]
