# SPDX-License-Identifier: Apache-2.0
"""One compression ratio per layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from kvpress.core.checks import Range
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, Wrapping
from kvpress.core.recipe import Eviction
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register

SHARE = Range(0, 1)


@register(
    "per_layer_compression",
    "budget",
    example="per_layer_compression(knorm):compression_ratios=(0.7,0.5,0.3,0.3)",
    refuses=(
        Refusal("per_layer_compression(knorm):compression_ratios=(0.5,)", "the model has another number of layers"),
        Refusal(
            "per_layer_compression(decoding(knorm)):compression_ratios=(0.7,0.5,0.3,0.3)",
            "the target of `decoding` sets the number of pairs; ratios would have no effect",
        ),
    ),
    exempt=(
        Exemption(
            EVERY_SUITE, "its list has one ratio per layer of a model; its own tests run the oracle and the state"
        ),
    ),
    status="reproduction",
)
@dataclass
class PerLayerCompressionPress(Wrapping):
    """Apply another press with a separate compression ratio in every layer.

    `press` scores the pairs. `compression_ratios` has one ratio per compressed layer, first layer first; layers with a
    sliding window are not counted. A ratio of 1 evicts the whole prompt in its layer. The ratio of the inner press is
    ignored.

    Paper: none.
    Differs from the paper: nothing.
    """

    press: BasePress
    compression_ratios: Sequence[float]

    def __post_init__(self) -> None:
        if not isinstance(self.compression_ratios, Sequence):
            raise TypeError(
                f"compression_ratios must be a list of one ratio per layer, got {self.compression_ratios!r}; "
                "for one ratio in all layers give compression_ratio to the press itself"
            )
        self.compression_ratios = tuple(self.compression_ratios)
        super().__post_init__()

    def validate(self) -> None:
        if not self.compression_ratios:
            raise ValueError("compression_ratios must hold one ratio per layer, got none")
        for layer, ratio in enumerate(self.compression_ratios):
            SHARE.check(f"compression_ratios[{layer}]", ratio)
        super().validate()

    @property
    def inner(self) -> BasePress:
        return self.press

    @property
    def compression_ratio(self) -> float:
        """Mean fraction of pairs that is evicted, over the layers."""
        return mean(self.compression_ratios)

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        num_ratios, num_layers = len(self.compression_ratios), 0 if model is None else len(model.growing)
        if model is not None and num_ratios != num_layers:
            raise ValueError(
                f"compression_ratios holds {num_ratios} ratios but {model.name} has {num_layers} layers that are compressed; "
                "give one ratio per layer"
            )
        if step.schedule.target is not None:
            raise TypeError(
                f"{type(self.press).__name__} keeps a target of pairs while tokens are generated, so compression_ratios would "
                "have no effect; give the ratios to a press for prompts, and compose it with prefill_decoding"
            )
        if step.amount.ratios:
            raise TypeError(f"ratios per layer are given twice: {type(self.press).__name__} has a list of its own")
        if step.amount.budget is not None:
            raise ValueError(
                f"give {type(self.press).__name__} no budget, got budget={step.amount.budget}, beside compression_ratios"
            )
        amount = replace(step.amount, ratio=0.0, ratios=tuple(self.compression_ratios))
        return replace(step, amount=amount, allocator=step.allocator.within_layers())
