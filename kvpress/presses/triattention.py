# SPDX-License-Identifier: Apache-2.0
"""TriAttention: expected logits of the mean query at many distances."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvpress.core import calibration as calibration
from kvpress.core.calibration import Calibration
from kvpress.core.checks import Count
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.press import ScorerPress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import register
from kvpress.observe.centres import QueryCentres, pair_sizes, pair_weights
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View

METHOD = "triattention"
CENTRES = Wanted(QueryCentres)


@register(
    "triattention",
    "evict",
    "Mao et al., 2026, arXiv:2604.04921",
    example="triattention:0.5",
    cases=("triattention:0.5,distances=5",),
)
@dataclass
class TriAttentionPress(ScorerPress):
    """Score a pair by the expected logit of the mean query for it, averaged over distances from near to far.

        s[g, t] = mean over d in 1, 2, 4, ... of R(T + d) mu_g . k_t + sum over rotary pairs f of (a_gf - |mu_gf|) |k_tf|
        score   = max over the group of s[g], less its mean over t and divided by its deviation

    mu_g is the mean of the queries of a head before rotation, a_gf the mean length of their rotary pair f, R(p) the
    rotation at position p and T the position of the newest token. `distances` is the number of distances d, so that the
    largest is 2 ** (distances - 1). `stats` is the file that `kvpress calibrate triattention` writes for the
    model; None computes mu and a from the tokens that the cache has read. The paper's schedule is
    `decoding(triattention):compression_interval=128`, with a prompt that `protect` keeps.

    Paper: Mao et al., TriAttention: Efficient Long Reasoning with Trigonometric KV Compression, 2026, arXiv:2604.04921.
    Differs from the paper: keys are not rotated back, because their phases cancel; every KV head chooses for itself, by the
    largest score of the query heads in its group; the statistics may be those of the request.
    """

    distances: Count = 17
    stats: str | None = field(default=None, kw_only=True)

    def validate(self) -> None:
        super().validate()
        if self.stats is not None:
            self.stats = os.fspath(self.stats)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if self.stats is not None and model is not None and model.loaded:
            self._file().check(METHOD, model, self.stats, _shapes)
        return super().recipe(model)

    def _file(self) -> Calibration:
        return calibration.read(str(self.stats), METHOD)

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (CENTRES,) if self.stats is None else ()

    def statistics(self, view: View) -> tuple[Tensor, Tensor]:
        """Return mean queries and mean lengths of rotary pairs, `[b, hq, D]` each."""
        rows = view.call.store.batch
        if self.stats is None:
            statistics = view.observer(CENTRES).means(list(range(rows)))
        else:
            tensors, device = self._file().tensors, view.positions.device
            part = view.call.layer.shards.part
            statistics = tuple(
                part(tensors[f"{view.layer}.{name}"]).to(device).expand(rows, -1, -1) for name in ("mean", "size")
            )
        return view.query_heads(statistics[0]), view.query_heads(statistics[1])

    def scores(self, view: View) -> Tensor:
        """Return scores `[b, h, n]`."""
        call, (mean, size) = view.call, self.statistics(view)
        rotated, like, factor = mean, None, 1.0
        if call.layer.rotates:
            next_positions = (
                call.next_positions(view.rows, view.seen, 1) + 2 ** torch.arange(self.distances, device=mean.device) - 1
            )
            cos, sin = (angles.float() for angles in call.angles(next_positions))
            like, factor = cos[:, :1], float((cos**2 + sin**2).mean().sqrt())
            rotated = call.rotate(mean[:, :, None], cos.mean(1, keepdim=True), sin.mean(1, keepdim=True))[:, :, 0]
        weights = pair_weights(call, like, mean.shape[2]) * factor
        spread = (size - pair_sizes(call, mean[:, :, None], like)[:, :, 0]).clamp_min(0) * weights
        scores = torch.empty(view.shape, device=mean.device)
        for h, (of_mean, of_spread) in enumerate(
            zip(*(x.chunk(view.shape[1], 1) for x in (rotated, spread)), strict=True)
        ):
            keys = view.keys[:, h : h + 1].float()
            sizes = pair_sizes(call, keys, None if like is None else like.expand(-1, keys.shape[2], -1))
            logits = of_mean @ keys[:, 0].mT + of_spread @ sizes[:, 0].mT
            deviation = logits.std(dim=-1, correction=0, keepdim=True).clamp_min(torch.finfo(logits.dtype).tiny)
            scores[:, h] = ((logits - logits.mean(dim=-1, keepdim=True)) / deviation).amax(dim=1)
        return scores


def _shapes(layer: LayerFacts) -> dict[str, tuple[int, ...]]:
    return {"mean": (layer.heads, layer.head_dim), "size": (layer.heads, layer.head_dim)}
