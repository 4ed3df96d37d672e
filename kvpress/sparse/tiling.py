# SPDX-License-Identifier: Apache-2.0
"""What presses that read prompts by tiles share: how many tiles at most, and how tiles are ranked."""

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
from kvpress.core.pattern import Pattern, Prompt
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Exemption
from kvpress.kernels import Tiles
from kvpress.kernels.prefill.contract import spans

Density = Annotated[float, Range(0, 1, above=True)]
IN_CHUNKS = Exemption(
    "fuzz",
    "what is read depends on the chunks that a prompt comes in, by design; tests/sparse/test_patterns.py composes it",
)
LEAST = 1e-12
"""Mass that counts as none where shares of it are compared."""


@dataclass
class PatternPress(BasePress):
    """Keeps every pair, and reads some tiles of keys for each block of queries while a prompt is read.

    Blocks have `block` tokens. A block of queries always reads the keys of its own tokens. Prompts, and turns, of up to two
    blocks are read whole. What is sealed already, as earlier turns are, is read as without a pattern; generated tokens read
    everything.
    """

    block: Count = field(default=64, kw_only=True)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        return Recipe(pattern=self.pattern_at)

    def pattern_at(self, layer: int) -> Pattern | None:
        """Return how a layer reads a prompt; None reads all of it."""
        return Reading(partial(self.tiles, layer), self.block)

    @abstractmethod
    def tiles(self, layer: int, prompt: Prompt) -> Tiles:
        """Return what is read in a layer."""


@dataclass
class EstimatedPress(PatternPress):
    """Chooses tiles by an estimate of their attention.

    With `max_density`, a block of queries reads at most this share of the blocks up to its own, rounded up: the best of those
    that are chosen, its own aside.
    """

    max_density: Density = field(default=1.0, kw_only=True)


@dataclass
class Reading(Pattern):
    """Asks a function for the tiles of a prompt."""

    choose: Callable[[Prompt], Tiles]
    block: int = 64

    def tiles(self, prompt: Prompt) -> Tiles:
        return self.choose(prompt)


@dataclass(frozen=True)
class Places:
    """Key blocks `at [nk]`, and the first and last, `[nq, 1]`, that hold the queries of each query block of `block` tokens."""

    at: Tensor
    own: Tensor
    last: Tensor
    block: int

    @classmethod
    def of(cls, prompt: Prompt, block: int) -> Places:
        own, last = spans(prompt.new, prompt.total, block, prompt.keys.device)
        at = torch.arange(prompt.shape(block)[-1], device=prompt.keys.device)
        return cls(at, own[:, None], last[:, None], block)

    @property
    def past(self) -> Tensor:
        """Which key blocks are not of the future, bool `[nq, nk]`."""
        return self.at <= self.last


def per_head(prompt: Prompt, estimate: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Call `estimate(queries [b, G, Q, D], keys [b, 1, T, D])` for each kv head; the results stand side by side in dim 1."""
    group = prompt.group
    return torch.cat(
        [
            estimate(prompt.queries[:, h * group : (h + 1) * group], prompt.keys[:, h : h + 1])
            for h in range(prompt.keys.shape[1])
        ],
        dim=1,
    )


def means(vectors: Tensor, block: int) -> Tensor:
    """Means of blocks of `vectors [..., n, D]` in float32, the last one over what it has: `[..., ceil(n / block), D]`."""
    count = vectors.shape[-2]
    whole = count // block * block
    parts = [vectors[..., :whole, :].float().unflatten(-2, (-1, block)).mean(dim=-2)]
    if whole < count:
        parts.append(vectors[..., whole:, :].float().mean(dim=-2, keepdim=True))
    return torch.cat(parts, dim=-2)


def of_means(prompt: Prompt, places: Places) -> Tensor:
    """Softmax of mean queries and mean keys over the blocks that are not of the future, float32 `[b, Hq, nq, nk]`."""

    def weights(queries: Tensor, keys: Tensor) -> Tensor:
        logits = prompt.logits(means(queries, places.block), means(keys, places.block))
        return logits.masked_fill(~places.past, -torch.inf).softmax(dim=-1)

    return per_head(prompt, weights)


def covering(scores: Tensor, share: float | Tensor) -> Tensor:
    """Mark the largest of `scores [..., n]`, not negative, that sum up to a share of the sum: the smallest such set."""
    if isinstance(share, float) and share >= 1:
        return torch.ones_like(scores, dtype=torch.bool)
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(dim=-1) - ranked
    needed = before < share * ranked.sum(dim=-1, keepdim=True).clamp_min(LEAST)
    return torch.zeros_like(needed).scatter(-1, order, needed)


def capped(chosen: Tensor, scores: Tensor, places: Places, density: float, single: Tensor | None = None) -> Tensor:
    """Leave of chosen tiles, both `[b, Hq, nq, nk]`, the best of every block of queries, as `EstimatedPress` says.

    Keys `single [b, Hq, T]` that are read one by one count too, but not inside a tile that is read: tiles get what they leave.
    """
    if density >= 1:
        return chosen
    most = ((places.last + 1) * density).ceil().long() - (places.last + 1 - places.own)
    others = chosen & (places.at < places.own)
    order = scores.masked_fill(~others, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    room, costs = most * places.block, torch.full_like(order, places.block)
    if single is not None:
        count = per_block(single.long(), places.block)[:, :, None]
        room = room - (count * (places.at < places.own)).sum(dim=-1, keepdim=True)
        costs = costs - count
    fits = costs.gather(-1, order).cumsum(dim=-1) <= room
    return others & torch.zeros_like(others).scatter(-1, order, fits)


def per_block(columns: Tensor, block: int) -> Tensor:
    """Sum `columns [b, Hq, T]` over blocks, `[b, Hq, nk]`."""
    return torch.nn.functional.pad(columns, (0, -columns.shape[-1] % block)).unflatten(-1, (-1, block)).sum(dim=-1)
