# SPDX-License-Identifier: Apache-2.0
"""Image tokens that neither all of the text nor any one of its tokens looks at are dropped, after several layers in turn."""

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
"""The paper's side of squares, in tokens."""


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
        Refusal("must_drop:merge=0.8,tokens=4:260", "ranges of tokens have no rows and columns"),
        Refusal("must_drop:merge=0.8,window=1", "nothing lies beside a token"),
        Refusal("must_drop:window=2", "it acts where tokens are merged"),
    ),
)
@dataclass
class MustDropPress(BasePress):
    """Hand later layers only the image and video tokens that the text looks at, decided anew after each of some layers.

        a[t, j] = mean over heads of the attention that text token t pays image token j
        after each layer of `layers`, j goes   if   sum over t of a[t, j] < all_below * sum over t and all images of a
                                               and   max over t of a[t, j] < each_below

    With `merge`, similar neighbours become one token before the first layer. The tokens of a picture are divided into squares
    of `window` by `window`, smaller ones at its right and lower edge, frame by frame:

        a square of n tokens x is merged   if   mean over its pairs of different tokens of cos(x[i], x[j]) >= merge
        its middle token, in reading order, gets the mean of all x; no layer computes or stores anything of the others

    x is what the vision encoder hands the language model. Without `merge`, nothing is merged. Squares are those of the model's
    grid; where it says none, nothing is merged, with a RuntimeWarning.

    Text is never dropped, nor the newest token of the prompt. `layers`, counted from 0, ascend; those behind one compute and
    store nothing of what it dropped, and once all have been read, those from the first to the last of them are cut back to what
    all of them handed on, so that generated tokens read no more there. The thresholds `all_below` and `each_below` are shares,
    of all the attention that the text pays images and of that of one token, so how much goes depends on the text; with the
    default `each_below` nothing does. Positions stay. Which tokens are images is found in the input ids; `tokens`, ranges of
    positions such as `4:260`, say it instead. It acts on the first prompt of a cache, which must be read at once. The key
    tokens that must stay are those that `ProtectPress` names: `protect(must_drop):tokens=...`.

    Paper: Liu et al., Multi-Stage Vision Token Dropping: Towards Efficient Multimodal Large Language Model, 2024,
    arXiv:2411.10803 (MustDrop).
    Differs from the paper: neighbours are compared and merged behind the vision encoder, which reads all patches, and not
    behind its first layer; the mean is a plain one. Key tokens, which the paper finds by the attention of the class token, are
    given instead; they are not merged either. Tokens keep their positions, where the authors' code counts those that are left
    anew. Layers are arguments, each row of a batch decides for itself.
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
        whole = all(isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 for layer in self.layers)
        if not self.layers or not whole or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(
                f"layers must be different whole numbers >= 0, ascending, such as (2, 6), got {self.layers!r}"
            )

        if self.merge is None and self.window != WINDOW:
            raise ValueError(
                f"window={self.window} acts where tokens are merged: give merge, such as 0.8, or leave it out"
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
        """Fraction of the pairs that the last cache has lost; see `last_cache`."""
        return removed(self)

    def keep(self, reached: Reached) -> Tensor:
        """Mark the tokens `[B, m]` that go on."""
        if not self.each_below:
            return torch.ones_like(reached.free)
        total = torch.zeros(reached.free.shape, device=reached.free.device)
        most = torch.zeros_like(total)
        for weights, text in reached.blocks():
            asked = weights * text[..., None] * reached.free[:, None]
            total += asked.sum(dim=1)
            most = torch.maximum(most, asked.amax(dim=1))
        few = total < self.all_below * total.sum(dim=1, keepdim=True)
        return ~(few & (most < self.each_below))

    def merged_into(self, entering: Entering) -> Tensor:
        """Return the column of the token that each is merged into, `[B, T]`; its own where it stays as it is."""
        own = torch.arange(entering.free.shape[1], device=entering.free.device).expand_as(entering.free)
        rows, columns = (entering.free & (entering.cells[..., 0] != UNKNOWN)).nonzero(as_tuple=True)
        if not len(rows) or self.merge is None:
            return own
        picture, frame, row, column = entering.cells[rows, columns].long().unbind(dim=-1)
        squares = torch.stack([rows, picture, frame, row // self.window, column // self.window], dim=1)
        square, size = squares.unique(dim=0, return_inverse=True, return_counts=True)[1:]
        unit = torch.nn.functional.normalize(entering.states[rows, columns].float(), dim=-1)
        total = unit.new_zeros(len(size), unit.shape[-1]).index_add_(0, square, unit)
        alone = unit.new_zeros(len(size)).index_add_(0, square, unit.square().sum(dim=-1))
        alike = (total.square().sum(dim=-1) - alone) / (size * (size - 1)).clamp_min(1)
        first = size.cumsum(0) - size
        middle = columns[square.argsort(stable=True)[first + size // 2]]
        merges = (size > 1) & (alike >= self.merge)
        into = own.clone()
        into[rows, columns] = torch.where(merges[square], middle[square], columns)
        return into
