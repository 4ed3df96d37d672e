# SPDX-License-Identifier: Apache-2.0
"""Calibration of `minference`: the pattern of each head that reads most of its attention at a given density."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.questions import SAMPLED_QUERIES, logits_of, query_positions, written_pairs
from kvpress.calibrate.run import Observed
from kvpress.core.checks import Count, check_fields
from kvpress.core.model import ModelFacts
from kvpress.core.pattern import PromptTensors
from kvpress.kernels import Tiles
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer
from kvpress.sparse.minference import A_SHAPE, BLOCKS, LINES, METHOD, SINKS, HeadPatterns, MInferencePress
from kvpress.sparse.tiling import Density

FEWEST = 8
"""Fewest blocks of a sequence, so that patterns differ."""
SINGLE = (0.02, 0.06, 0.12, 0.25)
"""Shares of a head's tokens that are tried as single keys; the remaining tokens are diagonals."""


@dataclass(frozen=True)
class PatternSettings(Observed):
    """Pattern of every query head, among patterns that read `density` of a prompt, for `minference`.

    Candidates are an A-shape, vertical and slash lines in four proportions, and blocks. Each is limited to `density` of the
    blocks before a query, like `max_density`. A head gets the candidate that reads the largest share of its attention over all
    texts. A layer gives `kind`, `vertical`, `slash` and that `share`, each `[Hq]`, float32. Sizes are in tokens of these texts,
    so use texts as long as the prompts.

    Paper: Jiang et al., MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention, 2024,
    arXiv:2407.02490.
    Differs from the paper: patterns are compared by the attention that they read, measured on queries of the whole text, and
    have the same price by construction.
    """

    density: Density = 0.25
    """Share of the pairs that a pattern may read."""
    last: Count = 64
    """Newest queries that choose lines."""
    block: Count = 64
    """Tokens in a block."""

    method: ClassVar[str] = METHOD

    @property
    def shortest(self) -> int:
        return max(SAMPLED_QUERIES, FEWEST * self.block)

    def check(self, model: ModelFacts) -> None:
        check_fields(self)

    def observer(self) -> PatternShares:
        return PatternShares(self)

    def tensors(self, observed: PatternShares) -> dict[str, Tensor]:
        assert observed.shares is not None  # noqa: S101 - a sequence has been read
        best = observed.shares.argmax(dim=0)
        sizes = torch.tensor(observed.candidates, dtype=torch.float32)[best]
        share = observed.shares.amax(dim=0) / observed.queries
        return {"kind": sizes[:, 0], "vertical": sizes[:, 1], "slash": sizes[:, 2], "share": share.float()}


class PatternShares(Observer):
    """Sums, over `queries`, of the share of their attention that each candidate reads: `shares [candidates, Hq]`."""

    def __init__(self, settings: PatternSettings) -> None:
        self.settings = settings
        self.shares: Tensor | None = None
        self.candidates: list[tuple[int, int, int]] = []
        self.queries = 0

    def observe(self, call: LayerCall) -> None:
        keys, values = written_pairs(call)
        prompt = PromptTensors(call.queries, keys, values, call.logits, call.layer.index)
        total, heads = prompt.total, prompt.queries.shape[1]
        positions = query_positions(total, keys.device)
        # The comparison ignores learned sinks.
        weights = logits_of(call, keys, positions).softmax(dim=-1).flatten(0, 1)
        press = MInferencePress(last=self.settings.last, block=self.settings.block, max_density=self.settings.density)
        self.candidates = list(candidates(int(self.settings.density * total)))
        sums = []
        for kind, vertical, slash in self.candidates:
            tiles = press.tiles_of(HeadPatterns.alike(heads, kind, vertical, slash), prompt)
            sums.append((weights * keys_read(tiles, positions, total)).sum(dim=(1, 2)))
        shares = torch.stack(sums).double().cpu()
        self.shares = shares if self.shares is None else self.shares + shares
        self.queries += len(positions)


def candidates(tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yield kinds and sizes of patterns whose later queries read about `tokens` tokens each."""
    yield A_SHAPE, SINKS, max(1, tokens - SINKS)
    for share in SINGLE:
        single = max(1, int(share * tokens))
        yield LINES, single, max(1, tokens - single)
    yield BLOCKS, 1, tokens


def keys_read(tiles: Tiles, positions: Tensor, total: int) -> Tensor:
    """Return the mask of the keys that the queries at `positions [n]` of a full prompt read, bool `[Hq, n, T]`."""
    query_blocks = positions // tiles.block
    key_blocks = torch.arange(tiles.chosen.shape[-1], device=positions.device)
    blocks = tiles.chosen[0][:, query_blocks] | (key_blocks == query_blocks[:, None])
    mask = blocks.repeat_interleave(tiles.block, dim=2)[..., :total]
    return mask if tiles.columns is None else mask | tiles.columns[0][:, None]
