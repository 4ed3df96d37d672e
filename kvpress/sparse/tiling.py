# SPDX-License-Identifier: Apache-2.0
"""Base of presses that read prompts by tiles: ranking tiles, and limiting their number."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import torch
from torch import Tensor

from kvpress.core.checks import Count, Range
from kvpress.core.model import ModelFacts
from kvpress.core.pattern import Pattern, PromptTensors
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Exemption
from kvpress.kernels import Tiles
from kvpress.kernels.prefill.contract import spans

Density = Annotated[float, Range(0, 1, above=True)]
IN_CHUNKS = Exemption(
    "fuzz",
    "the tiles depend on the chunks of a prompt, by design; tests/sparse/test_patterns.py composes this press",
)
NEGLIGIBLE = 1e-12
"""Attention mass that counts as zero where shares are compared."""


@dataclass
class PatternPress(BasePress):
    """Base of presses that keep every pair, and in a prefill compute some tiles of keys for each block of queries.

    Blocks have `block` tokens. A block of queries always reads the keys of its tokens. Prompts and turns of up to two blocks
    are read in full. Sealed pairs, such as those of earlier turns, are read as without a pattern, and generated tokens read
    everything.
    """

    block: Count = field(default=64, kw_only=True)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        return Recipe(pattern=self.pattern_at)

    def pattern_at(self, layer: int) -> Pattern | None:
        """Return the pattern of a layer; None reads all of a prompt."""
        return FunctionPattern(partial(self.tiles, layer), self.block)

    @abstractmethod
    def tiles(self, layer: int, prompt: PromptTensors) -> Tiles:
        """Return the tiles that a layer reads of a prompt."""
        raise NotImplementedError(f"{type(self).__name__} must override `tiles`")


@dataclass
class EstimatedPress(PatternPress):
    """Base of patterns that estimate the attention of tiles.

    `max_density` limits a block of queries to this share of the key blocks up to its end, rounded up: the blocks that hold its
    tokens, and the best of the chosen blocks before them.
    """

    max_density: Density = field(default=1.0, kw_only=True)


@dataclass
class FunctionPattern(Pattern):
    """Pattern whose tiles a function returns."""

    choose: Callable[[PromptTensors], Tiles]
    block: int = 64

    def tiles(self, prompt: PromptTensors) -> Tiles:
        return self.choose(prompt)


@dataclass(frozen=True)
class BlockGrid:
    """Key blocks of a prompt, and the key blocks that hold the tokens of each query block."""

    keys: Tensor
    """Indexes of the key blocks, `[nk]`."""
    first: Tensor
    """First key block with tokens of each query block, `[nq, 1]`."""
    last: Tensor
    """Last key block with tokens of each query block, `[nq, 1]`."""
    block: int
    """Tokens in a block."""

    @classmethod
    def of(cls, prompt: PromptTensors, block: int) -> BlockGrid:
        first, last = spans(prompt.new, prompt.total, block, prompt.keys.device)
        keys = torch.arange(prompt.shape(block)[-1], device=prompt.keys.device)
        return cls(keys, first[:, None], last[:, None], block)

    @property
    def causal(self) -> Tensor:
        """Mask of the tiles that hold a key which is no later than a query, bool `[nq, nk]`."""
        return self.keys <= self.last


def per_head(prompt: PromptTensors, estimate: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Call `estimate(queries [b, G, Q, D], keys [b, 1, T, D])` for each KV head, and concatenate the results along dim 1."""
    group = prompt.group
    return torch.cat(
        [
            estimate(prompt.queries[:, h * group : (h + 1) * group], prompt.keys[:, h : h + 1])
            for h in range(prompt.keys.shape[1])
        ],
        dim=1,
    )


def means(vectors: Tensor, block: int) -> Tensor:
    """Return the means of blocks of `vectors [..., n, D]`, float32 `[..., ceil(n / block), D]`; the last block may be short."""
    count = vectors.shape[-2]
    full = count // block * block
    blocks = [vectors[..., :full, :].float().unflatten(-2, (-1, block)).mean(dim=-2)]
    if full < count:
        blocks.append(vectors[..., full:, :].float().mean(dim=-2, keepdim=True))
    return torch.cat(blocks, dim=-2)


def mean_attention(prompt: PromptTensors, grid: BlockGrid) -> Tensor:
    """Return the softmax over key blocks of mean queries and mean keys, causal, float32 `[b, Hq, nq, nk]`."""

    def weights(queries: Tensor, keys: Tensor) -> Tensor:
        logits = prompt.logits(means(queries, grid.block), means(keys, grid.block))
        return logits.masked_fill(~grid.causal, -torch.inf).softmax(dim=-1)

    return per_head(prompt, weights)


def covering(scores: Tensor, share: float | Tensor) -> Tensor:
    """Mark the fewest of the non-negative `scores [..., n]` whose sum reaches a share of the total."""
    if isinstance(share, float) and share >= 1:
        return torch.ones_like(scores, dtype=torch.bool)
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(dim=-1) - ranked
    needed = before < share * ranked.sum(dim=-1, keepdim=True).clamp_min(NEGLIGIBLE)
    return torch.zeros_like(needed).scatter(-1, order, needed)


def capped(chosen: Tensor, scores: Tensor, grid: BlockGrid, density: float, single: Tensor | None = None) -> Tensor:
    """Return the best of the chosen tiles of every block of queries within a density, as `EstimatedPress` describes.

    Args:
        chosen: mask of tiles, bool `[b, Hq, nq, nk]`.
        scores: scores of all tiles, of the same shape.
        grid: blocks of the prompt.
        density: largest share of the key blocks up to a query block that is read.
        single: mask of keys that are read one by one, bool `[b, Hq, T]`. They count too, unless they lie in a tile that is
            read; tiles get the remaining room.
    """
    if density >= 1:
        return chosen
    limit = ((grid.last + 1) * density).ceil().long() - (grid.last + 1 - grid.first)
    earlier = chosen & (grid.keys < grid.first)
    order = scores.masked_fill(~earlier, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    room, costs = limit * grid.block, torch.full_like(order, grid.block)
    if single is not None:
        count = per_block(single.long(), grid.block)[:, :, None]
        room = room - (count * (grid.keys < grid.first)).sum(dim=-1, keepdim=True)
        costs = costs - count
    fits = costs.gather(-1, order).cumsum(dim=-1) <= room
    return earlier & torch.zeros_like(earlier).scatter(-1, order, fits)


def per_block(columns: Tensor, block: int) -> Tensor:
    """Return the sums of `columns [b, Hq, T]` over blocks, `[b, Hq, nk]`."""
    padded = torch.nn.functional.pad(columns, (0, -columns.shape[-1] % block))
    blocks: Tensor = padded.unflatten(-1, (-1, block))
    return blocks.sum(dim=-1)
