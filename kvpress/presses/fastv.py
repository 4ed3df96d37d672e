# SPDX-License-Identifier: Apache-2.0
"""Image tokens that the end of a prompt does not look at go no further than a first few layers."""

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
        Refusal("fastv:0.5 + h2o:0.5", "it watches how the prompt is read, of which later layers get a part"),
    ),
)
@dataclass
class FastVPress(BasePress):
    """Hand the layers after a first few only the image and video tokens that the last token of the prompt looks at most.

        a[j] = mean over heads of the attention that the last token pays image token j in layer `layer`
        layers behind it get all text and the (1 - ratio) n of n image tokens with the largest a[j]

    Layers up to `layer`, counted from 0, read and store everything. The others compute and store nothing of the tokens that
    were dropped, the share `compression_ratio` of those of images; positions stay. Text is never dropped, nor the newest token.
    Which tokens are images is found in the input ids; `tokens`, ranges of positions such as `4:260`, say it instead. It acts on
    the first prompt of a cache, which must be read at once. Spans that `ProtectPress` names stay.

    Paper: Chen et al., An Image is Worth 1/2 Tokens After Layer 2: Plug-and-Play Inference Acceleration for Large
    Vision-Language Models, 2024, arXiv:2403.06764 (FastV).
    Differs from the paper: after FastV, from memory of its method; every row of a batch chooses for itself, videos count as
    images, and ranked are the image tokens of all images together.
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
        """Mark the tokens `[B, m]` that go on."""
        free = reached.free
        last = reached.attention(torch.tensor([free.shape[1] - 1], device=free.device))[:, 0]
        counts = (free.sum(dim=1) * (1 - self.compression_ratio)).long()
        return top(last.masked_fill(~free, -torch.inf), counts) & free
