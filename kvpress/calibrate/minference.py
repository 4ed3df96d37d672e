# SPDX-License-Identifier: Apache-2.0
"""A pattern for every head, by how much of its attention each of some patterns reads at the same price."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.asked import ASKED, logits_of, places, written
from kvpress.calibrate.run import Observed
from kvpress.core.checks import Count, check_fields
from kvpress.core.model import ModelFacts
from kvpress.core.pattern import Prompt
from kvpress.kernels import Tiles
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer
from kvpress.sparse.minference import A_SHAPE, BLOCKS, LINES, METHOD, SINKS, HeadPatterns, MInferencePress
from kvpress.sparse.tiling import Density

FEWEST = 8
"""Blocks of a sequence in which a pattern can be told from others."""
SINGLE = (0.02, 0.06, 0.12, 0.25)
"""Parts of what a head may read that are tried as single keys beside diagonals."""


@dataclass(frozen=True)
class PatternSettings(Observed):
    """Which pattern every query head reads by, of those that read `density` of a prompt, for `minference`.

    Tried are an A-shape, vertical and slash lines in four proportions, and blocks, each cut to `density` of the blocks before
    a query as `max_density` does. A head gets the one that reads the largest part of its attention, over all texts. A layer
    gives `kind`, `vertical`, `slash` and the part that is read, `share`, each `[Hq]`, float32. Sizes are in tokens of these
    texts, so use texts as long as the prompts.

    Paper: Jiang et al., MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention, 2024,
    arXiv:2407.02490.
    Differs from the paper: patterns are compared by the attention that they read, measured on queries of the whole text, and
    have the same price by construction.
    """

    density: Density = 0.25
    last: Count = 64
    block: Count = 64

    method: ClassVar[str] = METHOD

    @property
    def shortest(self) -> int:
        return max(ASKED, FEWEST * self.block)

    def check(self, model: ModelFacts) -> None:
        check_fields(self)

    def observer(self) -> PatternShares:
        return PatternShares(self)

    def tensors(self, observed: PatternShares) -> dict[str, Tensor]:
        assert observed.shares is not None  # noqa: S101 - a sequence has been read
        best = observed.shares.argmax(dim=0)
        sizes = torch.tensor(observed.tried, dtype=torch.float32)[best]
        share = observed.shares.amax(dim=0) / observed.queries
        return {"kind": sizes[:, 0], "vertical": sizes[:, 1], "slash": sizes[:, 2], "share": share.float()}


class PatternShares(Observer):
    """Sums, over queries, of the part of their attention that each pattern reads: `shares [patterns, Hq]`, of `queries`."""

    def __init__(self, settings: PatternSettings) -> None:
        self.settings = settings
        self.shares: Tensor | None = None
        self.tried: list[tuple[int, int, int]] = []
        self.queries = 0

    def observe(self, call: LayerCall) -> None:
        keys, values = written(call)
        prompt = Prompt(call.queries, keys, values, call.logits, call.layer.index)
        total, heads = prompt.total, prompt.queries.shape[1]
        asked = places(total, keys.device)
        # Sinks have no part in what is compared.
        weights = logits_of(call, keys, asked).softmax(dim=-1).flatten(0, 1)
        press = MInferencePress(last=self.settings.last, block=self.settings.block, max_density=self.settings.density)
        self.tried = list(tried(int(self.settings.density * total)))
        found = []
        for kind, vertical, slash in self.tried:
            tiles = press.tiles_of(HeadPatterns.alike(heads, kind, vertical, slash), prompt)
            found.append((weights * read(tiles, asked, total)).sum(dim=(1, 2)))
        shares = torch.stack(found).double().cpu()
        self.shares = shares if self.shares is None else self.shares + shares
        self.queries += len(asked)


def tried(tokens: int) -> Iterator[tuple[int, int, int]]:
    """Kinds and sizes of patterns whose later queries read about so many tokens each."""
    yield A_SHAPE, SINKS, max(1, tokens - SINKS)
    for part in SINGLE:
        single = max(1, int(part * tokens))
        yield LINES, single, max(1, tokens - single)
    yield BLOCKS, 1, tokens


def read(tiles: Tiles, asked: Tensor, total: int) -> Tensor:
    """Which keys the queries at some places of a whole prompt read, bool `[Hq, n, T]`."""
    own = asked // tiles.block
    at = torch.arange(tiles.chosen.shape[-1], device=asked.device)
    blocks = tiles.chosen[0][:, own] | (at == own[:, None])
    found = blocks.repeat_interleave(tiles.block, dim=2)[..., :total]
    return found if tiles.columns is None else found | tiles.columns[0][:, None]
