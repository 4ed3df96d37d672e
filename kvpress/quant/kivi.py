# SPDX-License-Identifier: Apache-2.0
"""KIVI: keys per channel, values per token."""

from __future__ import annotations

from dataclasses import dataclass

from kvpress.core.checks import Size, check_count
from kvpress.core.model import LayerFacts
from kvpress.core.registry import register
from kvpress.quant.bits import Bits
from kvpress.quant.press import QuantisingPress, check_channel_group, pair
from kvpress.quant.uniform import WHOLE_HEAD, UniformCodec


@register("kivi", "quantise", "Liu et al., 2024, arXiv:2402.02750", example="kivi:bits=2", status="recommended")
@dataclass
class KIVIPress(QuantisingPress):
    """Store pairs in `bits` bits: keys per channel over `group_size` tokens, values per token over `group_size` channels.

        code = round((x - min) / s),   s = (max - min) / (2**bits - 1),   x' = code * s + min

    `bits` is one number, a pair (keys, values), a list with either for every layer, or a file of them; `group_size` is one
    number or a pair. The newest `residual_length` pairs of every head and its first `sinks` stay dense; all other pairs
    are encoded once, a group at a time. `skip_layers` stay dense. With `rotate`, keys and values are multiplied by a Hadamard
    matrix before they are encoded, which spreads the outliers of one channel over all channels. Stored pairs are not rotated
    back: attention rotates the queries and the output instead.

    Paper: Liu et al., KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache, 2024, arXiv:2402.02750.
    Differs from the paper: keys and values share one dense tail of `residual_length` to
    `residual_length + 2 * group_size - 1` pairs (on a GPU, which encodes generated pairs 256 at a time, 256 - `group_size`
    more), where the paper empties the keys' tail whenever it is full. Constant groups decode exactly. `rotate` is not in the
    paper. A large bias of keys is stored separately (`QuantisingPress`).
    """

    bits: Bits = 2
    group_size: int | tuple[int, int] = 32
    residual_length: Size = 128
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 0
    rotate: bool = False

    def validate(self) -> None:
        super().validate()
        for size in self.key_value_groups:
            check_count("group_size", size)

    @property
    def key_value_groups(self) -> tuple[int, int]:
        """Tokens that share a key scale, and channels that share a value scale."""
        return pair("group_size", self.group_size)

    def check_shape(self, layer: LayerFacts) -> None:
        check_channel_group(layer.head_dim, self.key_value_groups[1])
        super().check_shape(layer)

    def layer_codec(self, layer: int) -> UniformCodec:
        tokens, channels = self.key_value_groups
        bits = self.layer_bits().at(layer)
        block = WHOLE_HEAD if self.rotate else 0
        return UniformCodec(*bits, (tokens, 1), (1, channels), tokens, self.residual_length, self.sinks, block)
