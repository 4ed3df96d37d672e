# SPDX-License-Identifier: Apache-2.0
"""ZipCache: more bits for the tokens with the most attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.mixed import Flags, MixedSegment, divided
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.core.checks import Count, Range, Share, Size
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.core.registry import register
from kvpress.kernels import check_packing
from kvpress.observe.mass import ProbeAttention
from kvpress.observe.observer import Wanted
from kvpress.quant.bits import Bits
from kvpress.quant.press import QuantisingPress
from kvpress.quant.runs import Runs
from kvpress.quant.uniform import UniformRows, UniformSegment, parameter_bytes


@register("zipcache", "quantise", "He et al., 2024, arXiv:2405.14256")
@dataclass
class ZipCachePress(QuantisingPress):
    """Store the `salient_ratio` of pairs with the most normalised attention in `bits`, all others in `low_bits`.

        saliency[t] = mean over the probe queries that see t of softmax(q . k)[t], summed over the group

    Probes are a share `probe_ratio` of the queries of a prompt, half of them the newest and half chosen at random; 1 takes all.
    Keys are quantised per channel over all pairs of a head and class. Values are quantised per token, after every channel is
    divided by c = sqrt(max |v|). `salient_ratio` is the share of pairs that get more bits. Every `interval` generated tokens
    are ranked by the attention they received and encoded once. `bits` and `low_bits` are one number, a pair (keys, values), a
    list with either for every layer, or a file of them.

    Paper: He et al., ZipCache: Accurate and Efficient KV Cache Quantization with Salient Token Identification, 2024,
    arXiv:2405.14256.
    Differs from the paper: the mean is over the probes that see a token, where the authors' code divides by all queries
    that would see it; values have a scale per token and head; rows of a batch do not influence each other; generated tokens
    keep the channel scales of the prompt, and every generated query is a probe for the tokens not yet encoded; a large bias
    of keys is stored separately (`QuantisingPress`).
    """

    bits: Bits = 4
    low_bits: Bits = 2
    salient_ratio: Share = 0.6
    probe_ratio: Annotated[float, Range(0, 1, above=True)] = 0.1
    interval: Count = 100
    residual_length: Size = 0
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 0

    def validate(self) -> None:
        super().validate()
        self.layer_bits("low_bits")

    def check_shape(self, layer: LayerFacts) -> None:
        super().check_shape(layer)
        for bits in self.layer_bits("low_bits").at(layer.index):
            check_packing(layer.head_dim, bits)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if model is not None:
            self.layer_bits("low_bits").check("low_bits", model)
        return replace(super().recipe(model), observers=(Wanted(ProbeAttention, self.probe_ratio),))

    def layer_codec(self, layer: int) -> ZipCacheCodec:
        high, low = self.layer_bits().at(layer), self.layer_bits("low_bits").at(layer)
        return ZipCacheCodec(high, low, self.salient_ratio, self.interval, self.residual_length, self.sinks)


@dataclass
class ZipCacheCodec(Codec):
    """Codec that stores salient and other pairs as the two parts of a mixed segment; see `ZipCachePress`."""

    high: tuple[int, int]
    low: tuple[int, int]
    salient_ratio: float
    group: int
    residual: int
    sinks: int = 0

    reads_side: ClassVar[tuple[str, ...]] = ProbeAttention.sides
    spread = "stream"

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        saliency = segment.side_array("saliency") / segment.side_array("probes").clamp_min(1)
        counts = [round(self.salient_ratio * length) for length in segment.layout.lengths]
        salient = top_per_stream(saliency, segment.layout, counts)
        scale = self._channel_scale(segment, sealing)
        halves = zip(divided(segment, salient), (self.low, self.high), strict=True)
        low, high = (self._encode(pairs, bits, scale) for pairs, bits in halves)
        return MixedSegment(low, high, Flags.of(salient), segment.layout)

    def _channel_scale(self, segment: DenseSegment, sealing: Sealing) -> Tensor:
        """Square root of the largest |value| of every channel, float32 [N, Dv]; streams keep the scale of their first pairs."""
        layout, dim = segment.layout, segment.values.shape[1]
        stream = layout.streams_of(torch.arange(layout.total, device=segment.device))
        largest = torch.zeros(layout.streams, dim, device=segment.device)
        index = stream[:, None].expand(-1, dim)
        largest.scatter_reduce_(0, index, segment.values.float().abs(), "amax", include_self=False)
        scale = torch.where(largest == 0, 1.0, largest.sqrt())
        for earlier in reversed(sealing.earlier):
            for part in earlier.parts if isinstance(earlier, MixedSegment) else ():
                has_pairs = torch.tensor([length > 0 for length in part.layout.lengths], device=scale.device)
                scale = torch.where(has_pairs[:, None], part.channel_scale, scale)  # type: ignore[attr-defined]
        return scale

    def _encode(self, pairs: DenseSegment, bits: tuple[int, int], scale: Tensor) -> UniformSegment:
        layout, dim = pairs.layout, pairs.values.shape[1]
        stream = layout.streams_of(torch.arange(layout.total, device=pairs.device))
        scaled = pairs.values.float() / scale[stream]
        values = UniformRows.encode(scaled, bits[1], (1, dim), pairs.values.dtype)
        keys = [
            UniformRows.encode(pairs.keys[layout.rows(n)], bits[0], (length, 1))
            for n, length in enumerate(layout.lengths)
            if length
        ]
        runs = Runs.of_lengths(layout.lengths, pairs.device)
        joined = UniformRows.concatenate(keys) if keys else UniformRows.encode(pairs.keys, bits[0], (1, 1))
        return UniformSegment(replace(joined, runs=runs), values, layout, scale)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        share = self.salient_ratio
        bits = share * sum(self.high) + (1 - share) * sum(self.low)
        return dim * bits / 8 + 2 * parameter_bytes(dtype) + 1 / 8

    def tile_bytes(self, pairs: int, dim: int, dtype: torch.dtype, generated: bool = False) -> float:
        del generated
        # Scale, zero and run of the keys, in each class that has pairs.
        salient = round(self.salient_ratio * pairs)
        classes = (salient > 0) + (salient < pairs)
        return pairs * self.pair_bytes(dim, dtype) + classes * (2 * parameter_bytes(dtype) * dim + 4)

    def fixed_bytes(self, dim: int) -> float:
        return 2 * 4 * dim  # channel scales of the values, in each class


def top_per_stream(scores: Tensor, layout: Layout, counts: Sequence[int]) -> Tensor:
    """Mark the `counts[n]` largest scores of each stream n, bool [total]; ties go to the newest."""
    stream = layout.streams_of(torch.arange(layout.total, device=scores.device))
    order = scores.flip(0).argsort(descending=True, stable=True)
    order = layout.total - 1 - order
    order = order[stream[order].argsort(stable=True)]
    quota = torch.tensor(counts, device=scores.device)
    rank = torch.arange(layout.total, device=scores.device) - layout.on(scores.device)[0][stream]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(0, order, rank < quota[stream])
