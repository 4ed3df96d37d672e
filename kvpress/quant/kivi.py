"""KIVI: keys per channel, values per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvpress.checks import check_count
from kvpress.presses.base import BasePress
from kvpress.quant.packing import BITS, check_packing
from kvpress.quant.uniform import UniformCodec
from kvpress.registry import register
from kvpress.shapes import layer_shapes


@register("kivi", "quantise", "Liu et al., 2024, arXiv:2402.02750")
@dataclass
class KIVIPress(BasePress):
    """Store pairs in `bits` bits: keys per channel over `group_size` tokens, values per token over `group_size` channels.

        code = round((x - min) / s),   s = (max - min) / (2**bits - 1),   x' = code * s + min

    `bits` and `group_size` are one number, or one for keys and one for values. The newest `residual_length` pairs of every
    head stay as they are; older ones are encoded once, a group at a time. `skip_layers` are left dense.

    Paper: Liu et al., KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache, 2024, arXiv:2402.02750.
    Differs from the paper: keys and values share one dense tail of `residual_length` to `residual_length + group_size - 1`
    pairs, where the paper empties the keys' tail whenever it is full. Constant groups decode exactly.
    """

    bits: int | tuple[int, int] = 2
    group_size: int | tuple[int, int] = 32
    residual_length: int = 128
    skip_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.bits, Sequence):
            self.bits = tuple(self.bits)  # type: ignore[assignment]
        if isinstance(self.group_size, Sequence):
            self.group_size = tuple(self.group_size)  # type: ignore[assignment]
        self.skip_layers = (self.skip_layers,) if isinstance(self.skip_layers, int) else tuple(self.skip_layers)
        self.validate()

    def validate(self) -> None:
        for bits in self.key_value_bits:
            if bits not in BITS:
                raise ValueError(
                    f"bits must be one of {list(BITS)} or a pair (keys, values) of them, got {self.bits!r}"
                )
        for size in self.key_value_groups:
            check_count("group_size", size)
        check_count("residual_length", self.residual_length, least=0)

    @property
    def key_value_bits(self) -> tuple[int, int]:
        """Bits of keys and of values."""
        return _pair("bits", self.bits)

    @property
    def key_value_groups(self) -> tuple[int, int]:
        """Tokens that share a key scale, and channels that share a value scale."""
        return _pair("group_size", self.group_size)

    def post_init_from_model(self, model: Any) -> None:
        for dim in {shape.head_dim for shape in layer_shapes(model.config.get_text_config(decoder=True))}:
            self._check_dim(dim)

    def _check_dim(self, dim: int) -> None:
        channels = self.key_value_groups[1]
        if dim % min(channels, dim):
            allowed = [size for size in (16, 32, 64, 128, 256) if dim % size == 0]
            raise ValueError(
                f"group_size must divide the head dim {dim} of the model: one of {allowed}, got {channels}"
            )
        for bits in self.key_value_bits:
            check_packing(dim, bits)

    @property
    def codec(self) -> UniformCodec:
        key_bits, value_bits = self.key_value_bits
        tokens, channels = self.key_value_groups
        return UniformCodec(
            key_bits, value_bits, (tokens, 1), (1, channels), tokens, self.residual_length, self.skip_layers
        )


def _pair(name: str, value: int | tuple[int, ...]) -> tuple[int, int]:
    """Read one number for both keys and values, or one for each."""
    if not isinstance(value, tuple):
        return value, value
    if len(value) != 2:
        raise ValueError(f"{name} must be one number or a pair (keys, values), got {value!r}")
    return value[0], value[1]
