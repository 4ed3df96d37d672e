# SPDX-License-Identifier: Apache-2.0
"""MInference: every head reads by a pattern of its own, lines that the newest queries show or blocks that means rank."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvpress.calibrate import file as calibration
from kvpress.core.checks import Count
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.pattern import Prompt
from kvpress.core.recipe import Recipe
from kvpress.core.registry import register
from kvpress.kernels import Tiles
from kvpress.sparse.lines import newest_attention, slash_scores
from kvpress.sparse.tiling import IN_CHUNKS, EstimatedPress, Places, capped, of_means

METHOD = "minference"
SINKS, LOCAL = 30, 100
"""Columns and diagonals that are always among the lines."""
A_SHAPE, LINES, BLOCKS = range(3)
"""Patterns of a head."""


@dataclass(frozen=True)
class HeadPatterns:
    """The pattern `kind [Hq]` of every query head, and its sizes: whole numbers `vertical [Hq]` and `slash [Hq]`."""

    kind: Tensor
    vertical: Tensor
    slash: Tensor

    @classmethod
    def alike(cls, heads: int, kind: int, vertical: int, slash: int) -> HeadPatterns:
        """The same pattern for all heads."""
        return cls(*(torch.full((heads,), value) for value in (kind, vertical, slash)))


@register(
    "minference",
    "prefill",
    "Jiang et al., 2024, arXiv:2407.02490",
    example="minference:vertical=1000,slash=6096",
    cases=("minference:vertical=6,slash=12,last=8,block=8",),
    exempt=(IN_CHUNKS,),
)
@dataclass
class MInferencePress(EstimatedPress):
    """Read, for each head, the `vertical` keys and the `slash` diagonals that the `last` newest queries attend to most.

    The softmax of these queries over all keys is exact, and summed along columns and along diagonals of equal distance. The
    first 30 keys and the nearest 100 distances are always among the lines. Tiles that a chosen diagonal crosses are read whole,
    chosen keys outside of them one by one. With `max_density`, single keys are at most a quarter of that share of the prompt,
    which for its first blocks of queries can be more than their share, and tiles, ranked by what their diagonals get, take what
    single keys leave.

    `calibration` is a file of `kvpress calibrate --method minference`, which gives every head a pattern and its sizes in the
    place of `vertical` and `slash`: such lines; an A-shape, the first `vertical` keys and the nearest `slash` distances, for
    any prompt; or blocks, for each block of queries so many as `slash` tokens fill, ranked by the softmax of mean queries and
    mean keys.

    Paper: Jiang et al., MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention, 2024,
    arXiv:2407.02490.
    Differs from the paper: without a file every head is vertical-slash, which nearly all heads of the published configurations
    are; `max_density` is ours.
    """

    vertical: Count = 1000
    slash: Count = 6096
    last: Count = 64
    calibration: str | None = field(default=None, kw_only=True)

    def validate(self) -> None:
        super().validate()
        if self.calibration is not None:
            self.calibration = os.fspath(self.calibration)
            calibration.read(self.calibration, METHOD)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if self.calibration is not None and model is not None:
            calibration.read(self.calibration, METHOD).check(METHOD, model, self.calibration, _held)
        return super().recipe(model)

    def tiles(self, layer: int, prompt: Prompt) -> Tiles:
        if self.calibration is None:
            heads = HeadPatterns.alike(prompt.queries.shape[1], LINES, self.vertical, self.slash)
        else:
            tensors = calibration.read(self.calibration, METHOD).tensors
            heads = HeadPatterns(*(tensors[f"{layer}.{name}"].long() for name in ("kind", "vertical", "slash")))
        return self.tiles_of(heads, prompt)

    def tiles_of(self, heads: HeadPatterns, prompt: Prompt) -> Tiles:
        """Return what heads of given patterns read."""
        places, total, device = Places.of(prompt, self.block), prompt.total, prompt.keys.device
        kind, vertical, slash = (sizes.to(device) for sizes in (heads.kind, heads.vertical, heads.slash))
        columns, diagonals, received = self._lines(kind, prompt)
        # Single keys are a part of what may be read.
        most = total if self.max_density >= 1 else max(1, int(self.max_density * total / 4))
        single = _best(columns, vertical.clamp_max(most).masked_fill(kind == BLOCKS, 0))
        taken = _best(diagonals, slash.masked_fill(kind == BLOCKS, 0)).float()
        chosen = (slash_scores(prompt, taken, self.block) > 0) & places.past
        scores = slash_scores(prompt, received * taken, self.block)
        if bool((kind == BLOCKS).any()):
            blocks = (kind == BLOCKS)[:, None, None]
            pooled = of_means(prompt, places)
            best = _best(pooled, (-(-slash // self.block))[:, None]) & places.past
            chosen, scores = torch.where(blocks, best, chosen), torch.where(blocks, pooled, scores)
        return Tiles(capped(chosen, scores, places, self.max_density, single), self.block, single)

    def _lines(self, kind: Tensor, prompt: Prompt) -> tuple[Tensor, Tensor, Tensor]:
        """How columns and diagonals rank, and what diagonals receive, each float32 `[b, Hq, T]`."""
        near = torch.arange(prompt.total, 0, -1, device=kind.device).float()
        if not bool((kind == LINES).any()):
            fixed = near.expand(*prompt.queries.shape[:2], -1)
            return fixed, fixed, fixed
        columns, received = newest_attention(prompt, self.last)
        diagonals = received.clone()
        columns[..., :SINKS] = torch.inf
        diagonals[..., :LOCAL] = torch.inf
        shaped = (kind == A_SHAPE)[:, None]
        return (*(torch.where(shaped, near, found) for found in (columns, diagonals, received)),)  # type: ignore[return-value]


def _best(scores: Tensor, counts: Tensor) -> Tensor:
    """Mark the largest of `scores [b, Hq, ..., n]`, as many as `counts [Hq, ...]` say, bool."""
    most = min(int(counts.max()), scores.shape[-1])
    best = scores.topk(most, dim=-1).indices
    kept = torch.arange(most, device=scores.device) < counts[..., None]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, kept.expand(best.shape))


def _held(layer: LayerFacts) -> dict[str, tuple[int, ...]]:
    return {name: (layer.heads,) for name in ("kind", "vertical", "slash")}
