# SPDX-License-Identifier: Apache-2.0
"""Later layers without the image tokens that get little attention in an early layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.core.checks import Ratio, Size
from kvpress.core.dropping import Dropping, Reached
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Refusal, register
from kvpress.core.scoring import top
from kvpress.presses.protect import ranges_in
from kvpress.presses.vision import DROPS, pictures


@register(
    "fastv",
    "prefill",
    "Chen et al., 2024, arXiv:2403.06764",
    example="fastv:0.5,tokens=4:260",
    exempt=DROPS,
    refuses=(
        Refusal("fastv:0.5,tokens=0:8 4:12", "ranges overlap"),
        Refusal("fastv:1.0", "no image token would be left"),
        Refusal("fastv:0.5,layer=100,tokens=0:4", "there is no such layer"),
        Refusal("fastv:0.5 + h2o:0.5", "it records attention of the prompt, and later layers read only a part of it"),
    ),
)
@dataclass
class FastVPress(BasePress):
    """Drop image and video tokens with little attention from the last token of the prompt in all but the first layers.

        a[j] = mean over heads of the attention of the last token on image token j in layer `layer`
        later layers read all text and the (1 - ratio) n of n image tokens with the largest a[j]

    Layers up to number `layer`, counted from 0, read and store all tokens. Later layers neither compute nor store the
    dropped tokens, the share `compression_ratio` of the image tokens; the others keep their positions. Text and the newest
    token are never dropped. Image tokens are recognised by their input ids, or set by `tokens`, ranges of positions such as
    `4:260`. The press acts on the first prompt of a cache, which must be read in one pass. Spans protected by
    `ProtectPress` stay.

    Paper: Chen et al., An Image is Worth 1/2 Tokens After Layer 2: Plug-and-Play Inference Acceleration for Large
    Vision-Language Models, 2024, arXiv:2403.06764 (FastV).
    Differs from the paper: written from memory of the method; each row of a batch chooses its own tokens, videos count as
    images, and the tokens of all images are ranked together.
    """

    compression_ratio: Ratio = 0.5
    layer: Size = 2
    tokens: str = ""

    def validate(self) -> None:
        super().validate()
        ranges_in(self.tokens)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if not self.compression_ratio:
            return Recipe()
        return Recipe(dropping=Dropping(pictures(self, "both", self.tokens, model), (self.layer,), self.keep))

    def keep(self, reached: Reached) -> Tensor:
        """Return a mask `[B, m]` of the tokens that later layers read."""
        free = reached.free
        last = reached.attention(torch.tensor([free.shape[1] - 1], device=free.device))[:, 0]
        counts = (free.sum(dim=1) * (1 - self.compression_ratio)).long()
        return top(last.masked_fill(~free, -torch.inf), counts) & free
