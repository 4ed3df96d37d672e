# SPDX-License-Identifier: Apache-2.0
"""Representatives of evicted tokens, chosen by binary signatures over the heads of a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvpress.core.checks import Share, Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, ScorerAround, WrapperPress
from kvpress.core.recipe import Eviction
from kvpress.core.registry import Refusal, register
from kvpress.core.scoring import Scored, best_beside, top
from kvpress.observe.view import View

Anchor = Literal["random", "zeros", "ones", "alternate"]


@register(
    "kvcrush",
    "evict",
    "after Jha et al., 2025, arXiv:2503.00022",
    example="kvcrush(snapkv:0.5)",
    cases=(
        "kvcrush(snapkv:0.5,window_size=4)",
        "kvcrush(knorm:0.6):share=0.5,anchor='alternate'",
    ),
    refuses=(Refusal("kvcrush(adakv(snapkv:0.5))", "both would choose the pairs to keep"),),
)
@dataclass
class KVCrushPress(WrapperPress):
    """Keep the best pairs of another press, and representatives of the others by the heads that find a token important.

        bit[t, h] = 1 where token t is in the better half of the scores of head h
        d[t]      = number of heads h with bit[t, h] != anchor[h]                       Hamming distance
        of k pairs that stay:   the k - m best of each head, and m = round(share k) of its c others, sorted by (d[t], t), at
                                even steps of c / m

    Tokens of one distance form a bucket, and each bucket has representatives in proportion to its size, spread over the prompt.
    `share` is the share of the budget for representatives; 0 is the inner press. Pairs that the inner press always keeps, such
    as a window, are not counted in k. `anchor` is "zeros", "ones", "alternate" (0 and 1 by turns) or "random", drawn for each
    layer from `seed`. In later turns, a token has bit 0 in heads that evicted it.

    Raises `TypeError` around presses that choose the pairs themselves, such as `AdaKVPress`.

    Paper: after Jha et al., KVCrush: Key value cache size-reduction using similarity in head-behaviour, 2025, arXiv:2503.00022.
    Differs from the paper: written from its abstract and from public implementations. A bit is set by the better half of a
    head's scores; the heads are KV heads, since their query heads share a score; the number of buckets is that of the
    distances; single tokens are represented, not chunks; representatives are taken at even steps. The anchor of mean bits is
    left out, because half of the bits of each head are 1.
    """

    press: BasePress
    share: Share = 0.25
    anchor: Anchor = "random"
    seed: Size = 0

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        self.check_choice(step)
        return replace(step, scorer=Representatives(step.scorer, self.share, self.anchor, self.seed))


@dataclass(frozen=True)
class Representatives(ScorerAround):
    """Scorer that keeps the best pairs of the inner scorer, and representatives of the others."""

    share: float
    """Share of the kept pairs that are representatives."""
    anchor: Anchor
    """Signature that others are compared with."""
    seed: int
    """Random seed of the anchor."""

    ranks: ClassVar[bool] = True

    def scores(self, view: View) -> Tensor:
        return self._of_group(view)[id(view)]

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        view = scored.view
        best, num_others = best_beside(scored.scores, counts, self.share)
        distance = self._of_group(scored.whole)["distance"].gather(1, view.positions.flatten(1)).view(view.shape)
        order = (distance * view.seen + view.positions).masked_fill(best, torch.iinfo(torch.int64).max)
        rank = order.argsort(dim=2).argsort(dim=2)
        return best | at_even_steps(rank, (~best).sum(dim=2), num_others)

    def _of_group(self, view: View) -> dict[Any, Tensor]:
        """Return the scores `[b, h, n]` of each view of a layer by its id, and the distances `[b, tokens]`."""
        key = Representatives
        if key not in view.memo:
            group = view.group or [view]
            scores: dict[Any, Tensor] = {id(member): Scored(member, self.inner).scores for member in group}
            scores["distance"] = self._distance(group, [scores[id(member)] for member in group])
            view.memo[key] = scores
        results: dict[Any, Tensor] = view.memo[key]
        return results

    def _distance(self, group: list[View], scores: list[Tensor]) -> Tensor:
        """Return the Hamming distance of each token's signature to the anchor, `[b, tokens]`."""
        first = group[0]
        distance = torch.zeros(len(first.rows), first.seen, dtype=torch.int64, device=first.device)
        for view, score in zip(group, scores, strict=True):
            bits = torch.zeros(*view.shape[:2], view.seen, dtype=torch.bool, device=view.device)
            bits.scatter_(2, view.positions, top(score, view.length // 2))
            distance += (bits != self._anchor_bits(view)[:, None]).sum(dim=1)
        return first.call.layer.shards.sum(distance)

    def _anchor_bits(self, view: View) -> Tensor:
        """Return the anchor's bits of the heads of a view, `[h]`."""
        layer = view.call.layer
        heads = torch.arange(view.call.store.heads * layer.shards.count)
        if self.anchor == "random":
            generator = torch.Generator().manual_seed(self.seed + 1_000_003 * view.layer)
            bits = torch.randint(2, heads.shape, generator=generator).bool()
        else:
            bits = {"zeros": heads < 0, "ones": heads >= 0, "alternate": heads % 2 == 1}[self.anchor]
        return bits[view.model_heads].to(view.device)


def at_even_steps(rank: Tensor, length: Tensor, count: Tensor) -> Tensor:
    """Return the mask of `count [b, h]` of the ranks below `length [b, h]`, at even steps; `rank [b, h, n]`."""
    length, count = length[..., None], count[..., None]

    def before(number: Tensor) -> Tensor:
        return (2 * number * count + length) // (2 * length).clamp_min(1)

    return (rank < length) & (before(rank + 1) > before(rank))
