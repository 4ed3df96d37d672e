# SPDX-License-Identifier: Apache-2.0
"""SAW-INT4: each token encoded independently in 4 bits after a blockwise Hadamard rotation, as serving engines need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvpress.core.checks import Count, Size
from kvpress.core.model import LayerFacts
from kvpress.core.registry import register
from kvpress.quant.bits import Bits
from kvpress.quant.press import QuantisingPress, check_channel_group
from kvpress.quant.uniform import WHOLE_HEAD, UniformCodec


@register(
    "saw_int4",
    "quantise",
    "2026, arXiv:2604.19157",
    example="saw_int4:block_size=64",
)
@dataclass
class SAWInt4Press(QuantisingPress):
    """Multiply keys and values by a Hadamard matrix and store each token in `bits` bits with a separate scale and zero.

        y = x H,   code = round((y - min) / s),   s = (max - min) / (2**bits - 1),   x' = (code * s + min) H^T

    H consists of blocks of at most `block_size` channels, by default a whole head; the size of a block is a power of two that
    divides the head dim. `group_size` neighbouring channels share a scale and a zero, by default a whole head. Each pair is
    decoded independently, so pages of a serving engine can store the pairs directly. `bits` is one number, a pair (keys,
    values), a list with either for every layer, or a file of them. The newest `residual_length` pairs of every head and its
    first `sinks` stay dense, and up to 31 more while tokens are generated (255 on a GPU). `skip_layers` stay dense.

    Paper: SAW-INT4, 2026, arXiv:2604.19157; implemented from a summary.
    Differs from the paper: its sizes of blocks and groups are not known, so both are settings; widths other than 4 bits are
    offered; generated pairs are encoded 32 at a time, where an engine encodes every token at once; a large bias of keys is
    stored separately (`QuantisingPress`).
    """

    bits: Bits = 4
    block_size: Count | None = None
    group_size: Count | None = None
    residual_length: Size = 0
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 0

    def validate(self) -> None:
        super().validate()
        if self.block_size is not None and self.block_size & (self.block_size - 1):
            raise ValueError(
                f"block_size must be a power of two, such as 64, or None for a whole head, got {self.block_size}"
            )

    def check_shape(self, layer: LayerFacts) -> None:
        check_channel_group(layer.head_dim, self.group_size or WHOLE_HEAD)
        super().check_shape(layer)

    def layer_codec(self, layer: int) -> TokenCodec:
        group = 1, self.group_size or WHOLE_HEAD
        bits, block = self.layer_bits().at(layer), self.block_size or WHOLE_HEAD
        return TokenCodec(*bits, group, group, 32, self.residual_length, self.sinks, block)


@dataclass
class TokenCodec(UniformCodec):
    """Codec of uniform codes with scales per pair, so that a prompt is encoded to its last pair."""

    whole: ClassVar[bool] = True
