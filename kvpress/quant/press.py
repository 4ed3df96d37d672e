# SPDX-License-Identifier: Apache-2.0
"""Base of presses that quantise: bit widths, groups, the dense tail, and their checks against a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import ClassVar

from kvpress.cache.codec import Codec
from kvpress.core.checks import Size, check_count
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.kernels import BITS, check_packing
from kvpress.quant.bits import Bits, LayerBits, freeze

_SETTINGS = ("bits", "residual_length", "skip_layers", "sinks")
"""Fields of every quantising press."""


class QuantisingPress(BasePress):
    """Base of presses that store pairs in fewer bits; subclasses are dataclasses with these fields and define `layer_codec`.

    `bits` is one number, a pair (keys, values), a list with either for every layer, or a file of `kvpress calibrate
    bits`. The newest `residual_length` pairs of every head and its first `sinks` stay dense, as do the layers in
    `skip_layers`.

    In models with a large bias in their key projections, the keys of a head share a vector before their rotary embedding that
    is much longer than the differences between them. This vector is subtracted before keys are encoded, stored once for each
    head of each row, and added in attention at the angle of each position (`kvpress.cache.key_bias`). It is measured on the
    first encoded pairs of a head.
    """

    bits: Bits
    residual_length: Size
    skip_layers: tuple[int, ...]
    sinks: Size

    allowed_bits: ClassVar[Sequence[int]] = BITS

    def __post_init__(self) -> None:
        if missing := [name for name in _SETTINGS if not hasattr(self, name)]:
            raise TypeError(
                f"{type(self).__name__} must be a dataclass with the settings {', '.join(_SETTINGS)}: give {missing[0]} a "
                "default"
            )
        for name, value in vars(self).items():
            setattr(self, name, freeze(value))
        self.skip_layers = (self.skip_layers,) if isinstance(self.skip_layers, int) else self.skip_layers
        self.validate()

    def validate(self) -> None:
        super().validate()
        if isinstance(self.skip_layers, str) or not isinstance(self.skip_layers, Collection):
            raise TypeError(f"skip_layers must be indexes of layers, such as (0, 1), got {self.skip_layers!r}")
        for index in self.skip_layers:
            check_count("skip_layers", index, least=0)
        self.layer_bits()

    def layer_bits(self, name: str = "bits") -> LayerBits:
        """Read the setting `name` as bits per layer."""
        return LayerBits.parse(name, getattr(self, name), self.allowed_bits)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if model is not None:
            self.layer_bits().check("bits", model)
            last = max((layer.index for layer in model.layers), default=0)
            if self.skip_layers and max(self.skip_layers) > last:
                raise ValueError(
                    f"skip_layers must be indexes of layers of the model, 0 to {last}, got {max(self.skip_layers)}"
                )
            for layer in model.layers:
                if layer.index not in self.skip_layers:
                    self.check_shape(layer)
        return Recipe(codec=self.codec_at)

    def check_shape(self, layer: LayerFacts) -> None:
        """Refuse a layer whose head dim does not suit the settings."""
        for bits in self.layer_bits().at(layer.index):
            check_packing(layer.head_dim, bits)

    @abstractmethod
    def layer_codec(self, layer: int) -> Codec:
        """Return the codec of one layer."""
        raise NotImplementedError(f"{type(self).__name__} must override `layer_codec`")

    def codec_at(self, layer: int) -> Codec | None:
        """Return the codec of an attention layer; None leaves it dense."""
        return None if layer in self.skip_layers else self.layer_codec(layer)


def pair(name: str, value: int | tuple[int, ...]) -> tuple[int, int]:
    """Read one number for both keys and values, or one for each."""
    if not isinstance(value, tuple):
        return value, value
    if len(value) != 2:
        raise ValueError(f"{name} must be one number or a pair (keys, values), got {value!r}")
    return value[0], value[1]


def check_channel_group(dim: int, channels: int) -> None:
    """Refuse groups of channels that do not divide a head."""
    if dim % min(channels, dim):
        allowed = [size for size in (16, 32, 64, 128, 256) if dim % size == 0]
        raise ValueError(f"group_size must divide the head dim {dim} of the model: one of {allowed}, got {channels}")
