# SPDX-License-Identifier: Apache-2.0
"""SubGen: clusters of similar keys, each stored as one weighted pair."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.cache import attention
from kvpress.core.checks import Count, Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import ScorerPress
from kvpress.core.recipe import Recipe, Rewritten
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.observe.view import View
from kvpress.presses.clusters import pooled


@register(
    "subgen",
    "evict",
    "after Zandieh et al., 2024, arXiv:2402.06082",
    example="subgen:0.5",
    refuses=(
        Refusal("sample(subgen:0.5)", "both would weigh what stays"),
        Refusal(
            "subgen:0.5 + kivi:bits=4,residual_length=32",
            "pairs that a codec has sealed cannot be pooled; refused in the second turn",
        ),
    ),
    exempt=(
        Exemption(EVERY_SUITE, "values and weights change, so hiding what goes is another thing; compared with loops"),
    ),
)
@dataclass
class SubGenPress(ScorerPress):
    """Keep centres of clusters of keys, each with the mean value of its cluster and the weight of all its pairs.

        score[t]  = distance of k[t] from the nearest centre chosen before it, in a block of pairs where every next centre is
                    the key that is farthest from all centres so far
        v[c]      = mean of the values that are nearest to centre c          logit of c += log(number of these values)

    The pairs with the best scores become the centres of clusters of one radius. The budget sets the radius, the same in all
    blocks of `block_size` pairs, so that a block of varied keys gets many centres and one of similar keys few. The oldest
    `n_sink` pairs and the newest `window_size` are kept unchanged. Under `decoding(subgen)` centres are clustered again
    together with generated pairs, and weigh as many pairs as they stand for.

    Paper: after Zandieh et al., SubGen: Token Generation in Sublinear Time and Memory, 2024, arXiv:2402.06082.
    Differs from the paper: only its clusters are here, not its estimator. The paper samples keys of each cluster for the
    denominator of the softmax, and other pairs by the norm of their value for the numerator; here one weighted pair for each
    cluster serves both, so attention is read in one pass and is a mean of values, but the paper's error bound does not hold.
    The number of clusters is given, and not their radius; clusters stay within blocks.
    """

    block_size: Count = 256
    window_size: Size = 32
    n_sink: Size = 4

    weighs: ClassVar[bool] = True

    @property
    def protected(self) -> int:
        return self.window_size + self.n_sink

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        recipe = super().recipe(model)
        return replace(recipe, evictions=tuple(step.rewriting(self.cluster) for step in recipe.evictions))

    def scores(self, view: View) -> Tensor:
        """Return scores `[b, h, n]`, infinite for pairs that are kept unchanged."""
        scores = torch.full(view.shape, torch.inf, device=view.positions.device)
        for rows, size in self._blocks(view):
            step = max(1, attention.BLOCK_BYTES // (4 * size**2))
            blocks = view.keys[:, :, rows].unflatten(2, (-1, size)).flatten(0, 2)
            radii = [insertion_radii(distances(keys, keys)) for keys in blocks.split(step)]
            scores[:, :, rows] = torch.cat(radii).view(*view.shape[:2], -1)
        return scores

    def cluster(self, view: View, mask: Tensor) -> Rewritten:
        """Pool pairs outside `mask` into the nearest centre of their block, or of all blocks if theirs has none."""
        no_owner = view.length
        owner = torch.arange(no_owner, device=mask.device).where(mask, no_owner)
        centres = mask.clone()
        centres[..., : self.n_sink] = False
        centres[..., max(0, no_owner - self.window_size) :] = False
        for rows, size in self._blocks(view):
            at, step = (
                rows.start,
                size * max(1, attention.BLOCK_BYTES // (4 * size**2 * view.shape[0] * view.shape[1])),
            )
            for start in range(at, rows.stop, step):
                chunk = slice(start, min(start + step, rows.stop))
                keys, marked = (tensor[:, :, chunk].unflatten(2, (-1, size)) for tensor in (view.keys, centres))
                nearest = distances(keys, keys).masked_fill(~marked[..., None, :], torch.inf).min(dim=4)
                first = torch.arange(chunk.start, chunk.stop, size, device=mask.device)[:, None]
                block_owner = torch.where(nearest.values.isfinite(), nearest.indices + first, no_owner).flatten(2)
                owner[..., chunk] = block_owner.where(~mask[..., chunk], owner[..., chunk])
        without_owner = (owner == no_owner) & centres.any(dim=2, keepdim=True)
        for row, head in without_owner.any(dim=2).nonzero().tolist():
            centre_ranks, keys = centres[row, head].nonzero()[:, 0], view.keys[row, head]
            block = max(1, attention.BLOCK_BYTES // (4 * len(centre_ranks)))
            for chunk in without_owner[row, head].nonzero()[:, 0].split(block):
                owner[row, head, chunk] = centre_ranks[distances(keys[chunk], keys[centre_ranks]).argmin(dim=1)]
        return pooled(view, owner)

    def _blocks(self, view: View) -> list[tuple[slice, int]]:
        """Return ranges of pairs, each with the size of its blocks: the complete blocks, and the remainder."""
        first, last = min(self.n_sink, view.length), max(min(self.n_sink, view.length), view.length - self.window_size)
        complete = first + (last - first) // self.block_size * self.block_size
        ranges = [(slice(first, complete), self.block_size), (slice(complete, last), last - complete)]
        return [(rows, size) for rows, size in ranges if rows.stop > rows.start]


def distances(first: Tensor, second: Tensor) -> Tensor:
    """Return Euclidean distances `[..., m, s]` between vectors `[..., m, D]` and `[..., s, D]`, float32."""
    return torch.cdist(first.float(), second.float())


def insertion_radii(between: Tensor) -> Tensor:
    """Return the distance of each of s points from those chosen before it, `[m, s]`, for the distances `between [m, s, s]`.

    The first point is chosen first, at an infinite distance; each next point is the farthest from all chosen so far.
    """
    nearest = torch.full_like(between[:, 0], torch.finfo(torch.float32).max)
    nearest[:, 0] = torch.inf
    radii = torch.empty_like(nearest)
    for _ in range(between.shape[1]):
        farthest = nearest.max(dim=1, keepdim=True)
        radii.scatter_(1, farthest.indices, farthest.values)
        row = between.gather(1, farthest.indices[..., None].expand(-1, -1, between.shape[2]))[:, 0]
        nearest = torch.minimum(nearest, row).scatter_(1, farthest.indices, -torch.inf)
    return radii
