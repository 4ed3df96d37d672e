# SPDX-License-Identifier: Apache-2.0
"""Evict from the pairs of images and videos only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvpress.core.amount import Schedule
from kvpress.core.model import VISION, ModelFacts
from kvpress.core.press import BasePress, WrapperPress
from kvpress.core.recipe import Eviction
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.observe.spans import Pictures, PositionRanges, SpanRule
from kvpress.presses.protect import ranges_in

DROPS = (
    Exemption(EVERY_SUITE, "later layers get fewer tokens; compared with a full reading that hides them there"),
    Exemption("fuzz", "random prompts hold no images; its own tests read batches, turns, beams and files"),
)
"""Exemptions of presses that drop image tokens during prefill, each with the test that replaces the suite."""


@register(
    "vision",
    "schedule",
    example="vision(snapkv:0.5):tokens=4:260",
    cases=("vision(knorm:0.5):tokens=2:8", "vision(adakv(snapkv:0.5,window_size=4)):tokens=1:4 6:9"),
    exempt=(
        Exemption("pairs per layer", "what does not lie in its spans stays; its own tests count pairs of images"),
        Exemption(
            "fuzz", "random prompts hold no images; its own tests read them in batches, turns and while generating"
        ),
    ),
    refuses=(
        Refusal("vision(snapkv:0.5):kind=video,tokens=0:4", "the ranges name the tokens already"),
        Refusal("vision(decoding(knorm:0.5))", "images are compressed once, after the prompt or turn that has them"),
        Refusal("vision(knorm:0.5):tokens=0:8 4:12", "ranges overlap"),
        Refusal("vision(kvzip:0.5)", "it scores by reading a whole prompt again"),
    ),
)
@dataclass
class VisionPress(WrapperPress):
    """Evict from the pairs of images and videos only, by the scores of another press; text is kept.

    The ratio or budget of the inner `press` applies to the image and video tokens of a prompt; those of a later turn are
    evicted from after the turn has been read. Scores are computed among all pairs, text included. `kind` selects images,
    videos or both. Their tokens are found in the input ids by the ids in the model's configuration, or given by `tokens`,
    ranges of positions in the first prompt such as `4:260`, also for models that read text only. Spans of `ProtectPress`
    are kept.

    Paper: none; a rule about which pairs may be evicted.
    Differs from the paper: nothing.
    """

    press: BasePress
    kind: Literal["both", "image", "video"] = "both"
    tokens: str = ""

    def validate(self) -> None:
        check_kind(self.kind, self.tokens)
        super().validate()

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        return among(step, pictures(self, self.kind, self.tokens, model), self)


def check_kind(kind: str, tokens: str) -> None:
    """Check ranges of tokens, and that no `kind` is given with them.

    Raises:
        ValueError: the text has no valid ranges, or has ranges with a `kind` other than `both`.
    """
    if ranges_in(tokens) and kind != "both":
        raise ValueError(f"tokens={tokens!r} names the tokens already, so kind must be 'both', got {kind!r}")


def pictures(press: BasePress, kind: str, tokens: str, model: ModelFacts | None) -> SpanRule:
    """Return the rule for the image or video tokens of a prompt: by the token ids of a model, or by the ranges in `tokens`.

    Raises:
        ValueError: no ranges are given, and the model has no tokens of that kind.
    """
    if tokens:
        return PositionRanges(ranges_in(tokens))
    if model is None:
        return Pictures(())
    kinds = VISION if kind == "both" else (kind,)
    ids = tuple(model.vision[name] for name in kinds if name in model.vision)
    if not ids:
        what = " or ".join(kinds)
        raise ValueError(
            f"{type(press).__name__} acts on {what} tokens, and the configuration of {model.name} names none "
            f"({' or '.join(f'{name}_token_id' for name in kinds)}): use a model that reads them, or name ranges of tokens, "
            "tokens='4:260'"
        )
    return Pictures(ids)


def among(step: Eviction, rule: SpanRule, press: WrapperPress) -> Eviction:
    """Return the eviction restricted to spans, once, in the pass that ends a prompt or turn with such spans."""
    name, inner = type(press).__name__, type(press.inner).__name__
    if step.prepare is not None:
        raise TypeError(f"{name} cannot compress images by {inner}, which scores by reading a whole prompt again")
    if step.schedule.every is not None or step.schedule.chunk is not None or step.among is not None:
        raise TypeError(
            f"{name} compresses images once, after the prompt or turn that has them, so {inner} cannot schedule it; put "
            f"{name} inside, or compose the two with +"
        )
    schedule = Schedule(False, hidden_states=step.schedule.hidden_states, closing=True)
    amount = replace(step.amount, protected=0)
    return replace(step, amount=amount, schedule=schedule, among=rule, recent=0.0, fixed=True)
