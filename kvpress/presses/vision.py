# SPDX-License-Identifier: Apache-2.0
"""Only the pairs of images and videos compete; text stays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvpress.core.amount import Schedule
from kvpress.core.model import VISION, ModelFacts
from kvpress.core.press import BasePress, WrapperPress
from kvpress.core.recipe import Eviction
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.observe.spans import Pictures, Ranges, Spans
from kvpress.presses.protect import ranges_in

DROPS = (
    Exemption(EVERY_SUITE, "later layers are handed fewer tokens; compared with a full reading that hides them there"),
    Exemption("fuzz", "random prompts hold no images; its own tests read batches, turns, beams and files"),
)
"""What tests presses that drop image tokens while a prompt is read, in the place of the suites of all presses."""


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
        Refusal("vision(snapkv:0.5):kind=video,tokens=0:4", "the ranges say already which tokens are meant"),
        Refusal("vision(decoding(knorm:0.5))", "images are cut once, after the prompt or turn that brings them"),
        Refusal("vision(knorm:0.5):tokens=0:8 4:12", "ranges overlap"),
        Refusal("vision(kvzip:0.5)", "it scores by reading a whole prompt again"),
    ),
)
@dataclass
class VisionPress(WrapperPress):
    """Evict among the pairs of images and videos alone, by the scores of another press; no text is taken.

    The ratio or budget of the inner `press` is of the image and video tokens of a prompt; those of a later turn are cut when
    it has been read. Pairs are worth what they are worth among all pairs. `kind` says whether images, videos or both are cut.
    Which tokens these are is found in the input ids by the ids that the model's configuration names; `tokens`, ranges of
    positions in the first prompt such as `4:260`, say it instead, also for models that read text only. Spans that
    `ProtectPress` names stay.

    Paper: none; a rule about which pairs may go.
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
    """Refuse ranges of tokens that are none, and a kind of images beside ranges that say already which tokens are meant."""
    if ranges_in(tokens) and kind != "both":
        raise ValueError(f"tokens={tokens!r} says which tokens are meant, so kind must be 'both', got {kind!r}")


def pictures(press: BasePress, kind: str, tokens: str, model: ModelFacts | None) -> Spans:
    """Return the rule of which tokens of a prompt are images or videos, for a model, or of the given ranges.

    Raises:
        ValueError: no ranges are given, and the model has no tokens of that kind.
    """
    if tokens:
        return Ranges(ranges_in(tokens))
    if model is None:
        return Pictures(())
    wanted = VISION if kind == "both" else (kind,)
    found = tuple(model.vision[one] for one in wanted if one in model.vision)
    if not found:
        what = " or ".join(wanted)
        raise ValueError(
            f"{type(press).__name__} acts on {what} tokens, and the configuration of {model.name} names none "
            f"({' or '.join(f'{one}_token_id' for one in wanted)}): use a model that reads them, or name ranges of tokens, "
            "tokens='4:260'"
        )
    return Pictures(found)


def among(step: Eviction, rule: Spans, press: WrapperPress) -> Eviction:
    """Return the eviction that takes from spans alone, once, in the pass that ends a prompt or turn with them."""
    name, inner = type(press).__name__, type(press.inner).__name__
    if step.prepare is not None:
        raise TypeError(f"{name} cannot cut images by {inner}, which scores by reading a whole prompt again")
    if step.schedule.every is not None or step.schedule.chunk is not None or step.among is not None:
        raise TypeError(
            f"{name} cuts images once, after the prompt or turn that brings them, so {inner} cannot say when; put "
            f"{name} inside, or beside it with +"
        )
    schedule = Schedule(False, hidden_states=step.schedule.hidden_states, closing=True)
    amount = replace(step.amount, protected=0)
    return replace(step, amount=amount, schedule=schedule, among=rule, recent=0.0, fixed=True)
