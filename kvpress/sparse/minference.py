# SPDX-License-Identifier: Apache-2.0
"""MInference: every head has a pattern, lines found with the newest queries or blocks ranked by mean vectors."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvpress.core import calibration as calibration
from kvpress.core.checks import Count
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.pattern import PromptTensors
from kvpress.core.recipe import Recipe
from kvpress.core.registry import register
from kvpress.kernels import Tiles
from kvpress.sparse.lines import newest_attention, slash_scores
from kvpress.sparse.tiling import IN_CHUNKS, BlockGrid, EstimatedPress, capped, mean_attention

METHOD = "minference"
SINKS, LOCAL = 30, 100
"""First columns and nearest diagonals that are always among the lines."""
A_SHAPE, LINES, BLOCKS = range(3)
"""Patterns of a head."""


@dataclass(frozen=True)
class HeadPatterns:
    """Pattern of every query head, with its sizes; all tensors are int64 `[Hq]`."""

    kind: Tensor
    """`A_SHAPE`, `LINES` or `BLOCKS`."""
    vertical: Tensor
    """Number of columns."""
    slash: Tensor
    """Number of diagonals, or tokens of the blocks that a query block reads."""

    @classmethod
    def alike(cls, heads: int, kind: int, vertical: int, slash: int) -> HeadPatterns:
        """Return the same pattern for all heads."""
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

    The softmax of these queries over all keys is exact, and summed along columns and along diagonals of equal distance. `last`
    is the number of newest queries of a prompt whose attention is computed in full. The first 30 keys and the nearest 100
    distances are always among the lines. Tiles that a chosen diagonal crosses are read in full, chosen keys outside of them
    one by one. With `max_density`, single keys are at most a quarter of that share of the prompt, which can exceed the share
    of its first blocks of queries. Tiles get the remaining room, ranked by the attention of their diagonals.

    `calibration` is a file of `kvpress calibrate minference`, which gives every head a pattern and its sizes, instead
    of `vertical` and `slash`: such lines; an A-shape, the first `vertical` keys and the nearest `slash` distances, the same for
    any prompt; or blocks, for each block of queries as many as `slash` tokens fill, ranked by the softmax of mean queries and
    mean keys.

    Paper: Jiang et al., MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention, 2024,
    arXiv:2407.02490.
    Differs from the paper: without a file every head is vertical-slash, like nearly all heads of the published configurations;
    `max_density` is ours.
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
            calibration.read(self.calibration, METHOD).check(METHOD, model, self.calibration, _shapes)
        return super().recipe(model)

    def tiles(self, layer: int, prompt: PromptTensors) -> Tiles:
        if self.calibration is None:
            heads = HeadPatterns.alike(prompt.queries.shape[1], LINES, self.vertical, self.slash)
        else:
            tensors = calibration.read(self.calibration, METHOD).tensors
            part = (lambda table: table) if prompt.call is None else prompt.call.layer.shards.part
            heads = HeadPatterns(*(part(tensors[f"{layer}.{name}"]).long() for name in ("kind", "vertical", "slash")))
        return self.tiles_of(heads, prompt)

    def tiles_of(self, heads: HeadPatterns, prompt: PromptTensors) -> Tiles:
        """Return the tiles and single keys that heads with these patterns read of a prompt."""
        grid, total, device = BlockGrid.of(prompt, self.block), prompt.total, prompt.keys.device
        kind, vertical, slash = (sizes.to(device) for sizes in (heads.kind, heads.vertical, heads.slash))
        columns, diagonals, received = self._lines(kind, prompt)
        # Single keys get a quarter of the allowed density.
        limit = total if self.max_density >= 1 else max(1, int(self.max_density * total / 4))
        single = _best(columns, vertical.clamp_max(limit).masked_fill(kind == BLOCKS, 0))
        chosen_diagonals = _best(diagonals, slash.masked_fill(kind == BLOCKS, 0)).float()
        chosen = (slash_scores(prompt, chosen_diagonals, self.block) > 0) & grid.causal
        scores = slash_scores(prompt, received * chosen_diagonals, self.block)
        if bool((kind == BLOCKS).any()):
            blocks = (kind == BLOCKS)[:, None, None]
            pooled = mean_attention(prompt, grid)
            best = _best(pooled, (-(-slash // self.block))[:, None]) & grid.causal
            chosen, scores = torch.where(blocks, best, chosen), torch.where(blocks, pooled, scores)
        return Tiles(capped(chosen, scores, grid, self.max_density, single), self.block, single)

    def _lines(self, kind: Tensor, prompt: PromptTensors) -> tuple[Tensor, Tensor, Tensor]:
        """Return the ranking of columns and of diagonals, and the attention of diagonals, each float32 `[b, Hq, T]`."""
        nearness = torch.arange(prompt.total, 0, -1, device=kind.device).float()
        if not bool((kind == LINES).any()):
            fixed = nearness.expand(*prompt.queries.shape[:2], -1)
            return fixed, fixed, fixed
        columns, received = newest_attention(prompt, self.last)
        diagonals = received.clone()
        columns[..., :SINKS] = torch.inf
        diagonals[..., :LOCAL] = torch.inf
        shaped = (kind == A_SHAPE)[:, None]
        return (*(torch.where(shaped, nearness, scores) for scores in (columns, diagonals, received)),)  # type: ignore[return-value]


def _best(scores: Tensor, counts: Tensor) -> Tensor:
    """Mark the `counts [Hq, ...]` largest of `scores [b, Hq, ..., n]`, bool."""
    largest = min(int(counts.max()), scores.shape[-1])
    best = scores.topk(largest, dim=-1).indices
    kept = torch.arange(largest, device=scores.device) < counts[..., None]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, kept.expand(best.shape))


def _shapes(layer: LayerFacts) -> dict[str, tuple[int, ...]]:
    return {name: (layer.heads,) for name in ("kind", "vertical", "slash")}
