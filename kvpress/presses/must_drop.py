# SPDX-License-Identifier: Apache-2.0
"""MustDrop: image tokens that get little attention from the text are dropped, after several layers in turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.core.checks import Count, Share
from kvpress.core.dropping import Dropping, Entering, Reached
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, removed
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Refusal, register
from kvpress.observe.pictures import UNKNOWN
from kvpress.presses.protect import ranges_in
from kvpress.presses.vision import DROPS, pictures

WINDOW = 3
"""Side of the squares in the paper, in tokens."""


@register(
    "must_drop",
    "prefill",
    "Liu et al., 2024, arXiv:2411.10803",
    example="must_drop:all_below=0.01,each_below=0.2,layers=(1,2),tokens=4:260",
    exempt=DROPS,
    refuses=(
        Refusal("must_drop:each_below=0.001,tokens=0:8 4:12", "ranges overlap"),
        Refusal("must_drop:all_below=1.5", "a share is at most 1"),
        Refusal("must_drop:layers=()", "no layer would drop anything"),
        Refusal("must_drop:layers=(6,2)", "layers must ascend"),
        Refusal("must_drop:merge=0.8,tokens=4:260", "ranges of tokens have no rows and columns"),
        Refusal("must_drop:merge=0.8,window=1", "a square of one token has no neighbours to merge"),
        Refusal("must_drop:window=2", "window is used only with merge"),
    ),
)
@dataclass
class MustDropPress(BasePress):
    """Drop image and video tokens with little attention from the text, anew after each of some layers.

        a[t, j] = mean over heads of the attention of text token t to image token j
        after each layer of `layers`, j is dropped   if   sum over t of a[t, j] < all_below * sum over t and all images of a
                                                     and  max over t of a[t, j] < each_below

    With `merge`, similar neighbours become one token before the first layer. The tokens of a picture are divided into
    squares of `window` by `window`, smaller ones at its right and lower edge, frame by frame:

        a square of n tokens x is merged   if   mean over its pairs of different tokens of cos(x[i], x[j]) >= merge
        its middle token, in reading order, gets the mean of all x; no layer computes or stores the others

    x are the outputs of the vision encoder. Without `merge`, nothing is merged. Squares are cut from the grid that the
    model reports; without a grid nothing is merged, with a RuntimeWarning.

    Text is never dropped, nor the newest token of the prompt. `layers` are counted from 0 and ascend; the layers behind one
    of them neither compute nor store the dropped tokens. Once all layers have read the prompt, those from the first to the
    last of `layers` keep only tokens that all of them passed on, so that generated tokens read no more there. `all_below`
    is a share of all attention that the text pays to images, `each_below` of the attention of one token, so the number of
    dropped tokens depends on the text; with the default `each_below`, none is dropped. Positions are unchanged. Image
    tokens are found in the input ids, or given by `tokens`, ranges of positions such as `4:260`. The press acts on the
    first prompt of a cache, which must be read in one pass. Key tokens that must stay are given with `ProtectPress`:
    `protect(must_drop):tokens=...`.

    Paper: Liu et al., Multi-Stage Vision Token Dropping: Towards Efficient Multimodal Large Language Model, 2024,
    arXiv:2411.10803 (MustDrop).
    Differs from the paper: neighbours are compared and merged behind the vision encoder, which reads all patches, and not
    behind its first layer; the mean is unweighted. Key tokens, which the paper finds by the attention of the class token,
    are given by the user; they are not merged either. Tokens keep their positions, where the authors' code renumbers the
    remaining ones. Layers are arguments, and each row of a batch decides for itself.
    """

    all_below: Share = 1.0
    each_below: Share = 0.0
    layers: tuple[int, ...] = (2, 6, 10, 14)
    tokens: str = ""
    merge: Share | None = None
    window: Count = WINDOW

    def __post_init__(self) -> None:
        self.layers = tuple(self.layers)
        super().__post_init__()

    def validate(self) -> None:
        super().validate()
        ranges_in(self.tokens)
        are_layers = all(isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 for layer in self.layers)
        if not self.layers or not are_layers or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers must be different integers >= 0, ascending, such as (2, 6), got {self.layers!r}")

        if self.merge is None and self.window != WINDOW:
            raise ValueError(
                f"window={self.window} is used only with merge: give merge, such as 0.8, or leave window out"
            )
        if self.merge is not None and self.window < 2:
            raise ValueError(f"window must be at least 2, the side of squares that are merged, got {self.window}")
        if self.merge is not None and self.tokens:
            raise ValueError(
                f"merge={self.merge} merges neighbours in pictures that are found in the input ids, and tokens={self.tokens!r} "
                "names ranges of tokens, which have no rows and columns: leave out one of the two"
            )

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        rule = pictures(self, "both", self.tokens, model)
        merge = None if self.merge is None else self.merged_into
        return Recipe(dropping=Dropping(rule, self.layers, self.keep, cut=True, merge=merge))

    @property
    def compression_ratio(self) -> float:
        """Fraction of the pairs that was evicted from the last cache; see `last_cache`."""
        return removed(self)

    def keep(self, reached: Reached) -> Tensor:
        """Return a mask `[B, m]` of the tokens that later layers read."""
        if not self.each_below:
            return torch.ones_like(reached.free)
        total = torch.zeros(reached.free.shape, device=reached.free.device)
        largest = torch.zeros_like(total)
        for weights, text in reached.blocks():
            attention_weights = weights * text[..., None] * reached.free[:, None]
            total += attention_weights.sum(dim=1)
            largest = torch.maximum(largest, attention_weights.amax(dim=1))
        is_low = total < self.all_below * total.sum(dim=1, keepdim=True)
        return ~(is_low & (largest < self.each_below))

    def merged_into(self, entering: Entering) -> Tensor:
        """Return the column of the token that each token is merged into, `[B, T]`; its own where it is not merged."""
        columns_before = torch.arange(entering.free.shape[1], device=entering.free.device).expand_as(entering.free)
        rows, columns = (entering.free & (entering.cells[..., 0] != UNKNOWN)).nonzero(as_tuple=True)
        if not len(rows) or self.merge is None:
            return columns_before
        picture, frame, row, column = entering.cells[rows, columns].long().unbind(dim=-1)
        squares = torch.stack([rows, picture, frame, row // self.window, column // self.window], dim=1)
        square, size = squares.unique(dim=0, return_inverse=True, return_counts=True)[1:]
        unit = torch.nn.functional.normalize(entering.states[rows, columns].float(), dim=-1)
        total = unit.new_zeros(len(size), unit.shape[-1]).index_add_(0, square, unit)
        self_similarity = unit.new_zeros(len(size)).index_add_(0, square, unit.square().sum(dim=-1))
        mean_similarity = (total.square().sum(dim=-1) - self_similarity) / (size * (size - 1)).clamp_min(1)
        first = size.cumsum(0) - size
        middle = columns[square.argsort(stable=True)[first + size // 2]]
        merges = (size > 1) & (mean_similarity >= self.merge)
        targets = columns_before.clone()
        targets[rows, columns] = torch.where(merges[square], middle[square], columns)
        return targets
