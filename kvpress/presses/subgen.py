# SPDX-License-Identifier: Apache-2.0
"""Clusters of similar keys, each as one pair that weighs as many."""

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
        v[c]      = mean of the values that are nearest to centre c          logit of c += log(how many these are)

    The best scores are the centres of clusters of one radius, which a budget sets: it is the same in all blocks of
    `block_size` pairs, so that a stretch of varied keys gets many centres and one of similar keys few. The oldest `n_sink`
    pairs and the newest `window_size` stay as they are. Under `decoding(subgen)` centres are clustered again with what was
    generated, and weigh as many pairs as they stand for.

    Paper: after Zandieh et al., SubGen: Token Generation in Sublinear Time and Memory, 2024, arXiv:2402.06082.
    Differs from the paper: a centre carries the mean value of its cluster, where the paper draws keys of each cluster for the
    denominator and pairs by the norm of their value for the numerator; the number of clusters is given, and not their
    radius; clusters stay within blocks.
    """

    block_size: Count = 256
    window_size: Size = 32
    n_sink: Size = 4

    weighs: ClassVar[bool] = True

    @property
    def protected(self) -> int:
        return self.window_size + self.n_sink

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        found = super().recipe(model)
        return replace(found, evictions=tuple(step.rewriting(self.cluster) for step in found.evictions))

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`, infinite for what stays as it is."""
        scores = torch.full(view.shape, torch.inf, device=view.positions.device)
        for rows, size in self._blocks(view):
            step = max(1, attention.BLOCK_BYTES // (4 * size**2))
            blocks = view.keys[:, :, rows].unflatten(2, (-1, size)).flatten(0, 2)
            radii = [insertion_radii(distances(part, part)) for part in blocks.split(step)]
            scores[:, :, rows] = torch.cat(radii).view(*view.shape[:2], -1)
        return scores

    def cluster(self, view: View, mask: Tensor) -> Rewritten:
        """Pool what is not marked into the nearest centre of its block, or of all blocks where its own has none."""
        nobody = view.length
        owner = torch.arange(nobody, device=mask.device).where(mask, nobody)
        centres = mask.clone()
        centres[..., : self.n_sink] = False
        centres[..., max(0, nobody - self.window_size) :] = False
        for rows, size in self._blocks(view):
            at, step = rows.start, size * max(1, attention.BLOCK_BYTES // (4 * size**2 * view.shape[0] * view.shape[1]))
            for start in range(at, rows.stop, step):
                some = slice(start, min(start + step, rows.stop))
                keys, marked = (part[:, :, some].unflatten(2, (-1, size)) for part in (view.keys, centres))
                near = distances(keys, keys).masked_fill(~marked[..., None, :], torch.inf).min(dim=4)
                first = torch.arange(some.start, some.stop, size, device=mask.device)[:, None]
                own = torch.where(near.values.isfinite(), near.indices + first, nobody).flatten(2)
                owner[..., some] = own.where(~mask[..., some], owner[..., some])
        lost = (owner == nobody) & centres.any(dim=2, keepdim=True)
        for row, head in lost.any(dim=2).nonzero().tolist():
            there, keys = centres[row, head].nonzero()[:, 0], view.keys[row, head]
            block = max(1, attention.BLOCK_BYTES // (4 * len(there)))
            for some in lost[row, head].nonzero()[:, 0].split(block):
                owner[row, head, some] = there[distances(keys[some], keys[there]).argmin(dim=1)]
        return pooled(view, owner)

    def _blocks(self, view: View) -> list[tuple[slice, int]]:
        """Return the stretches of pairs that are clustered, each cut into blocks of a size: whole blocks, and a rest."""
        first, last = min(self.n_sink, view.length), max(min(self.n_sink, view.length), view.length - self.window_size)
        whole = first + (last - first) // self.block_size * self.block_size
        found = [(slice(first, whole), self.block_size), (slice(whole, last), last - whole)]
        return [(rows, size) for rows, size in found if rows.stop > rows.start]


def distances(some: Tensor, others: Tensor) -> Tensor:
    """Return the Euclidean distances `[..., m, s]` between vectors `[..., m, D]` and `[..., s, D]`, float32."""
    return torch.cdist(some.float(), others.float())


def insertion_radii(between: Tensor) -> Tensor:
    """Return how far each of s points is from those chosen before it, `[m, s]`, given the distances `between [m, s, s]`.

    The first point comes first, infinitely far; then always the one that is farthest from all before it.
    """
    nearest = torch.full_like(between[:, 0], torch.finfo(torch.float32).max)
    nearest[:, 0] = torch.inf
    radii = torch.empty_like(nearest)
    for _ in range(between.shape[1]):
        found = nearest.max(dim=1, keepdim=True)
        radii.scatter_(1, found.indices, found.values)
        row = between.gather(1, found.indices[..., None].expand(-1, -1, between.shape[2]))[:, 0]
        nearest = torch.minimum(nearest, row).scatter_(1, found.indices, -torch.inf)
    return radii
