# SPDX-License-Identifier: Apache-2.0
"""ThinK: keys without the channels that matter least to the newest queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.segment import DenseSegment
from kvpress.core.checks import Count, Ratio
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import register
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted
from kvpress.quant.key_channels import ThinCodec, ThinnedSegment, refuse_latents


@register("think", "quantise", "Xu et al., 2024, arXiv:2407.21018", example="think:0.5")
@dataclass
class ThinKPress(BasePress):
    """Store keys without the channels that matter least to the newest queries of the prompt.

        score[h, c] = mean over the last w queries and the group of q[c]^2 * mean over the stored keys of k[t, c]^2

    Each head of each row drops the `int(key_channel_compression_ratio * D)` channels with the lowest scores. Attention uses the
    same channels of the queries, so it reads fewer bytes and decodes nothing. `window_size` is w; the newest w pairs keep all
    channels. Generated pairs are stored in the channels chosen for the prompt, w pairs at a time. Values stay dense.

    Paper: Xu et al., ThinK: Thinner Key Cache by Query-Driven Pruning, 2024, arXiv:2407.21018.
    Differs from the paper: generated tokens are also stored in fewer channels once they leave the window. Unlike NVIDIA
    kvpress, which sets channels to zero, this press does not store them.
    """

    key_channel_compression_ratio: Ratio = 0.0
    window_size: Count = 32

    @property
    def compression_ratio(self) -> float:
        """Fraction of the bytes of stored pairs that is left out."""
        return self.key_channel_compression_ratio / 2

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:
        raise AttributeError(
            f"compression_ratio cannot be set to {value}: it follows from key_channel_compression_ratio, which can be set"
        )

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if not self.key_channel_compression_ratio:
            return Recipe()
        refuse_latents(model)
        return Recipe(codec=self.codec_at, observers=(Wanted(QueryEnergy, self.window_size),))

    def codec_at(self, layer: int) -> Codec:
        """Return the codec of an attention layer."""
        del layer
        return ThinKCodec(self.key_channel_compression_ratio, self.window_size)


class QueryEnergy(Observer):
    """Sum of squares of the newest `size` queries of a prompt, as mean over the GQA group: `total [B, H, D]` of `count [B]`.

    If a prompt has fewer queries, the first generated ones count too. `tail [B, Hq, <= size, D]` stores the newest queries of
    a chunked prompt until its last chunk.
    """

    state_names = ("total", "count", "tail")

    def __init__(self, size: int) -> None:
        self.size = size
        self.total: Tensor | None = None
        self.count: Tensor | None = None
        self.tail: Tensor | None = None

    def observe(self, call: LayerCall) -> None:
        call.need("its queries")
        queries = call.queries[:, :, -self.size :]
        if call.phase == "decode":
            self._add(call, queries)
            return
        if self.tail is not None and queries.shape[2] < self.size:
            queries = torch.cat([self.tail, queries], dim=2)[:, :, -self.size :]
        self.tail = None
        if call.tokens.prompt_end and call.store.seen < call.tokens.prompt_end:
            self.tail = queries.clone(memory_format=torch.contiguous_format)
        else:
            self.total = self.count = None
            self._add(call, queries)

    def _add(self, call: LayerCall, queries: Tensor) -> None:
        batch, _, new, dim = queries.shape
        if self.total is None or self.count is None:
            self.total = torch.zeros(batch, call.store.heads, dim, device=queries.device)
            self.count = torch.zeros(batch, device=queries.device)
        counts = torch.ones(batch, new, device=queries.device)
        if call.tokens.mask is not None and new > 1:
            counts = call.tokens.mask[:, -new:].to(queries.device, torch.float32)
        counts = counts * (counts.cumsum(dim=1) <= self.size - self.count[:, None])
        if bool(counts.any()):
            squares = queries.float().square() * counts[:, None, :, None]
            self.total = self.total + squares.sum(dim=2).unflatten(1, (call.store.heads, -1)).mean(dim=2)
            self.count = self.count + counts.sum(dim=1)

    def means(self) -> Tensor:
        """Return the mean squares of every stream, `[N, D]`."""
        if self.total is None or self.count is None:
            raise ValueError("no queries have been observed yet")
        return (self.total / self.count.clamp_min(1)[:, None, None]).flatten(0, 1)


class ThinKCodec(ThinCodec):
    """Codec of keys without a share `ratio` of their channels; see `ThinKPress`."""

    whole: ClassVar[bool] = True

    def __init__(self, ratio: float, window: int) -> None:
        self.ratio, self.group, self.residual = ratio, window, window

    def width(self, dim: int) -> int:
        return dim - int(dim * self.ratio)

    def channels(self, segment: DenseSegment, sealing: Sealing, stream: Tensor) -> Tensor:
        """Return the channels with the highest scores; streams keep the channels of their first pairs."""
        lengths = segment.layout.lengths_tensor.to(segment.device)
        key_energy = torch.zeros(len(lengths), segment.keys.shape[1], device=segment.device)
        key_energy.index_add_(0, stream, segment.keys.float().square())
        query_energy: Tensor = sealing.observers[Wanted(QueryEnergy, self.residual)].means().to(segment.device)
        scores = query_energy * key_energy / lengths.clamp_min(1)[:, None]
        channels = scores.topk(self.width(scores.shape[1]), dim=1).indices.sort(dim=1).values.to(torch.int16)
        for earlier in reversed(sealing.earlier):
            if isinstance(earlier, ThinnedSegment):
                has_pairs = (earlier.layout.lengths_tensor > 0).to(segment.device)
                channels = torch.where(has_pairs[:, None], earlier.channels, channels)
        return channels
