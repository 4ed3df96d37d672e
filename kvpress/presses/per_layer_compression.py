"""One compression ratio per layer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from torch import nn

from kvpress.checks import check_ratio
from kvpress.context import LayerCall
from kvpress.presses.base import BasePress, Observers
from kvpress.presses.wrapper import WrapperPress
from kvpress.registry import register


@register("per_layer_compression", "budget")
@dataclass
class PerLayerCompressionPress(BasePress):
    """Apply another press with a compression ratio of its own in every layer.

    `press` is the one that scores. `compression_ratios` holds one ratio per layer that is compressed, first layer first;
    layers with a sliding window are not counted. The ratio of the inner press itself is not used.

    Paper: none.
    Differs from the paper: nothing.
    """

    press: BasePress
    compression_ratios: Sequence[float]

    def __post_init__(self) -> None:
        self.compression_ratios = tuple(self.compression_ratios)
        self.validate()

    def validate(self) -> None:
        if not hasattr(self.press, "compression_ratio"):
            raise TypeError(
                f"PerLayerCompressionPress needs a press with a compression_ratio, got {type(self.press).__name__}"
            )
        if not self.compression_ratios:
            raise ValueError("compression_ratios must hold one ratio per layer, got none")
        for layer, ratio in enumerate(self.compression_ratios):
            check_ratio(f"compression_ratios[{layer}]", ratio)
            with_ratio(self.press, ratio).validate()

    @property
    def compression_ratio(self) -> float:
        """Fraction of pairs removed, on average over the layers."""
        return mean(self.compression_ratios)

    @property
    def is_head_wise(self) -> bool:  # type: ignore[override]
        """Whether heads of a layer may end up with different numbers of pairs."""
        return self.press.is_head_wise

    @property
    def acts_in_decoding(self) -> bool:  # type: ignore[override]
        """Whether the inner press evicts while tokens are generated."""
        return self.press.acts_in_decoding

    def observers(self) -> Observers:
        return self.press.observers()

    def planned_pairs(self, tokens: int) -> int:
        return round(mean(with_ratio(self.press, ratio).planned_pairs(tokens) for ratio in self.compression_ratios))

    def check_length(self, tokens: int) -> None:
        for ratio in self.compression_ratios:
            with_ratio(self.press, ratio).check_length(tokens)

    def post_init_from_model(self, model: nn.Module) -> None:
        from kvpress.hf import growing_layers

        given, layers = len(self.compression_ratios), len(growing_layers(model))
        if given != layers:
            raise ValueError(
                f"compression_ratios holds {given} ratios but {type(model).__name__} has {layers} layers that are compressed; "
                "give one ratio per layer"
            )
        self.press.post_init_from_model(model)

    def after_prefill(self, call: LayerCall) -> None:
        self._at(call).after_prefill(call)

    def after_decode(self, call: LayerCall) -> None:
        self._at(call).after_decode(call)

    def _at(self, call: LayerCall) -> BasePress:
        from kvpress.hf import layer_types

        kinds = layer_types(call.module.config.get_text_config(decoder=True))  # type: ignore[operator,union-attr]
        index: int = call.module.layer_idx  # type: ignore[assignment]
        return with_ratio(self.press, self.compression_ratios[kinds[:index].count("full_attention")])


def with_ratio(press: BasePress, ratio: float) -> BasePress:
    """Return a press like this one with another compression ratio."""
    twin = copy.copy(press)
    if isinstance(twin, WrapperPress):
        twin.press = with_ratio(twin.press, ratio)  # type: ignore[assignment]
    else:
        twin.compression_ratio = ratio  # type: ignore[attr-defined]
    return twin
