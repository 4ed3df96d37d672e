# SPDX-License-Identifier: Apache-2.0
"""Image tokens that neither all of the text nor any one of its tokens looks at are dropped, after several layers in turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.core.checks import Share
from kvpress.core.dropping import Dropping, Reached
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, removed
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Refusal, register
from kvpress.presses.protect import ranges_in
from kvpress.presses.vision import DROPS, pictures


@register(
    "must_drop",
    "prefill",
    "Liu et al., 2024, arXiv:2411.10803",
    example="must_drop:all_below=0.01,each_below=0.2,layers=(1,2),tokens=4:260",
    exempt=DROPS,
    refuses=(
        Refusal("must_drop:each_below=0.001,tokens=0:8 4:12", "ranges overlap"),
        Refusal("must_drop:all_below=1.5", "more than all of the attention"),
        Refusal("must_drop:layers=()", "no layer would drop anything"),
        Refusal("must_drop:layers=(6,2)", "layers must ascend"),
    ),
)
@dataclass
class MustDropPress(BasePress):
    """Hand later layers only the image and video tokens that the text looks at, decided anew after each of some layers.

        a[t, j] = mean over heads of the attention that text token t pays image token j
        after each layer of `layers`, j goes   if   sum over t of a[t, j] < all_below * sum over t and all images of a
                                               and   max over t of a[t, j] < each_below

    Text is never dropped. `layers`, counted from 0, ascend; those behind one compute and store nothing of what it dropped,
    and once all have been read, those from the first to the last of them are cut back to what all of them handed on, so that
    generated tokens read no more there. The thresholds `all_below` and `each_below` are shares, of all the attention that the
    text pays images and of that of one token, so how much goes depends on the text; with the default `each_below` nothing
    does. Positions stay. Which tokens are images is found in the input ids; `tokens`, ranges of positions such as `4:260`, say
    it instead. It acts on the first prompt of a cache, which must be read at once. The key tokens that must stay are those that
    `ProtectPress` names: `protect(must_drop):tokens=...`.

    Paper: Liu et al., Multi-Stage Vision Token Dropping: Towards Efficient Multimodal Large Language Model, 2024,
    arXiv:2411.10803 (MustDrop).
    Differs from the paper: the stage in the vision encoder is left out, which merges neighbouring patches and finds the key
    tokens by the attention of the class token: key tokens are given instead. Tokens keep their positions, where the
    authors' code counts those that are left anew. Layers are arguments, each row of a batch decides for itself.
    """

    all_below: Share = 1.0
    each_below: Share = 0.0
    layers: tuple[int, ...] = (2, 6, 10, 14)
    tokens: str = ""

    def __post_init__(self) -> None:
        self.layers = tuple(self.layers)
        super().__post_init__()

    def validate(self) -> None:
        super().validate()
        ranges_in(self.tokens)
        whole = all(isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 for layer in self.layers)
        if not self.layers or not whole or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(
                f"layers must be different whole numbers >= 0, ascending, such as (2, 6), got {self.layers!r}"
            )

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        rule = pictures(self, "both", self.tokens, model)
        return Recipe(dropping=Dropping(rule, self.layers, self.keep, cut=True))

    @property
    def compression_ratio(self) -> float:
        """Fraction of the pairs that the last cache has lost; see `last_cache`."""
        return removed(self)

    def keep(self, reached: Reached) -> Tensor:
        """Mark the tokens `[B, m]` that go on."""
        total = torch.zeros(reached.free.shape, device=reached.free.device)
        most = torch.zeros_like(total)
        for weights, text in reached.blocks():
            asked = weights * text[..., None] * reached.free[:, None]
            total += asked.sum(dim=1)
            most = torch.maximum(most, asked.amax(dim=1))
        few = total < self.all_below * total.sum(dim=1, keepdim=True)
        return ~(few & (most < self.each_below))
