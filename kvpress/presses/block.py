# SPDX-License-Identifier: Apache-2.0
"""Eviction block by block, with the pairs kept so far."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.core.checks import Count
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, ScorerAround, WrapperPress
from kvpress.core.recipe import Eviction
from kvpress.core.registry import Refusal, register
from kvpress.core.scoring import Scored
from kvpress.observe.view import View


@register(
    "block",
    "evict",
    "Park et al., 2025, arXiv:2504.15364",
    example="block(keydiff:0.5)",
    cases=("block(keydiff:0.5):block_size=3",),
    refuses=(
        Refusal("block(adakv(snapkv:0.5))", "it keeps equally many pairs in every head, and the inner press does not"),
        Refusal(
            "block(kvcompose:0.5)", "it compares all pairs of all layers, and a block has scores of its own pairs only"
        ),
    ),
)
@dataclass
class BlockPress(WrapperPress):
    """Evict block by block: add a block to the pairs kept so far, and keep the best of both by another press.

        S = the first `kept` pairs;   for each block of `block_size` others:   S = keep(S + block)

    `block_size` is the number of pairs of a block. At most `kept + block_size` pairs per head are scored at a time, which
    bounds the memory of a scorer.

    Paper: the block-wise eviction of KeyDiff, Park et al., 2025, arXiv:2504.15364.
    Differs from the paper: the whole prompt is read with full attention before the first eviction.
    """

    press: BasePress
    block_size: Count = 128

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        self.check_even(step)
        return replace(step, scorer=InBlocks(step.scorer, self.block_size))


@dataclass(frozen=True)
class InBlocks(ScorerAround):
    """Scorer that chooses among the pairs kept so far and the next block, one block after another."""

    block_size: int
    """Number of pairs of a block."""

    ranks: ClassVar[bool] = True

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        assert isinstance(counts, int)  # noqa: S101 - heads that differ are refused
        view, kept = scored.view, counts
        ranks = torch.arange(view.length, device=view.positions.device).expand(*view.shape[:2], -1)
        index = ranks[..., :kept]
        for start in range(kept, view.length, self.block_size):
            index = torch.cat([index, ranks[..., start : start + self.block_size]], dim=2)
            mask = Scored(view.pairs(index), self.inner).choose(kept)
            # A stable sort moves marked pairs to the front; `nonzero` would wait for the device.
            index = index.gather(2, (~mask).int().argsort(dim=2, stable=True)[..., :kept])
        return torch.zeros_like(ranks, dtype=torch.bool).scatter(2, index, True)

    def scores(self, view: View) -> Tensor:
        raise NotImplementedError("pairs are compared block by block, so there are no scores of all of them")
