# SPDX-License-Identifier: Apache-2.0
"""LeanK: keys without the channels whose learned scales are smallest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.segment import DenseSegment
from kvpress.core import calibration as calibration
from kvpress.core.checks import Count, Ratio, Size
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Refusal, register
from kvpress.quant.key_channels import ThinCodec, refuse_latents

METHOD = "leank"


@register(
    "leank",
    "quantise",
    "Zhang et al., 2025, arXiv:2508.02215",
    example="leank:0.5,recent_size=256",
    needs="scales of the model: `kvpress calibrate leank` (`calibration`)",
    refuses=(Refusal("leank:0.5", "without a file of its own, a model other than the bundled reference model"),),
)
@dataclass
class LeanKPress(BasePress):
    """Store keys without a share `ratio` of the channels of all heads: the channels with the smallest learned scales.

    Scales in [0, 1] of every channel of every KV head are learned once for a model (`kvpress calibrate leank`): they are made
    as small as possible while the hidden states stay those of the full model. `calibration` is that file; the bundled
    reference model needs none. `ratio` is the share of key channels that is dropped, so that half of it is the share of the
    cache. The largest scales of all layers set how many channels each layer stores. All heads of a layer store the same number
    of channels, the best of each head, a multiple of `align` and at least `align`. Attention uses the same channels of the
    queries, so it reads fewer bytes and decodes nothing. The first `sink_size` pairs and the newest `recent_size` keep all
    channels; pairs are sealed `interval` at a time. Values stay dense.

    Paper: Zhang et al., LeanK: Learnable K Cache Channel Pruning for Efficient Decoding, 2025, arXiv:2508.02215.
    Differs from the paper: heads of a layer store equally many channels, so no head loses all of them or becomes a streaming
    head; `align` is 8, where the kernels of the paper need 32.
    """

    ratio: Ratio = 0.0
    calibration: str | None = None
    sink_size: Size = 128
    recent_size: Size = 768
    interval: Count = 128
    align: Count = 8

    @property
    def compression_ratio(self) -> float:
        """Fraction of the bytes of stored pairs that is left out."""
        return self.ratio / 2

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:
        raise AttributeError(f"compression_ratio cannot be set to {value}: it follows from ratio, which can be set")

    @property
    def source(self) -> Path:
        """The calibration file."""
        return calibration.given_or_shipped(self.calibration, METHOD)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if not self.ratio:
            return Recipe()
        if model is None:
            return Recipe(codec=self.codec_at)
        refuse_latents(model)
        for layer in model.growing:
            if layer.head_dim < self.align:
                raise ValueError(
                    f"align must be at most the head dim {layer.head_dim} of {model.name}, got {self.align}"
                )
        if not model.loaded:
            return Recipe(codec=self.codec_at)
        codecs = {layer: self._codec(order) for layer, order in self.known_channels(model).items()}
        return Recipe(codec=codecs.get)

    def codec_at(self, layer: int) -> Codec:
        """Return the codec of a layer without known scales, which stores the mean number of channels."""
        del layer
        return self._codec(None)

    def _codec(self, kept: Tensor | None) -> LeanKCodec:
        return LeanKCodec(self.ratio, self.align, kept, (self.sink_size, self.recent_size, self.interval))

    def known_channels(self, model: ModelFacts) -> dict[int, Tensor]:
        """Return the stored channels of every layer, int16 `[H, C]`, ascending."""
        file = calibration.read(self.source, METHOD)
        file.check(METHOD, model, self.source, _held)
        scales = {layer.index: file.tensors[f"{layer.index}.scale"] for layer in model.growing}
        all_scales = torch.cat([scale.flatten() for scale in scales.values()])
        best = all_scales.argsort(descending=True, stable=True)[: len(all_scales) - int(len(all_scales) * self.ratio)]
        chosen = torch.zeros_like(all_scales).index_fill(0, best, 1.0)
        kept = {}
        for (layer, scale), mask in zip(
            scales.items(), chosen.split([s.numel() for s in scales.values()]), strict=True
        ):
            count = rounded(float(mask.sum()) / len(scale), self.align, scale.shape[1])
            order = scale.argsort(dim=1, descending=True, stable=True)
            kept[layer] = model.shards.part(order)[:, :count].sort(dim=1).values.to(torch.int16)
        return kept


def rounded(count: float, align: int, limit: int) -> int:
    """Return the multiple of `align` nearest to `count`, at least `align` and at most `limit`."""
    return min(max(align, int(count / align + 0.5) * align), limit // align * align)


def _held(layer: LayerFacts) -> dict[str, tuple[int, ...]]:
    return {"scale": (layer.kv_heads, layer.head_dim)}


class LeanKCodec(ThinCodec):
    """Codec of the `kept` key channels `[H, C]`, or of a share 1 - `ratio` if they are None; see `LeanKPress`."""

    def __init__(self, ratio: float, align: int, kept: Tensor | None, sizes: tuple[int, int, int]) -> None:
        self.ratio, self.align, self.kept = ratio, align, kept
        self.sinks, self.residual, self.group = sizes

    def width(self, dim: int) -> int:
        return rounded(dim * (1 - self.ratio), self.align, dim) if self.kept is None else self.kept.shape[1]

    def channels(self, segment: DenseSegment, sealing: Sealing, stream: Tensor) -> Tensor:
        del stream
        if self.kept is None:
            raise ValueError("no scales of this model were loaded: enter the press on a model first")
        return self.kept.to(segment.device).repeat(segment.layout.streams // sealing.heads, 1)
