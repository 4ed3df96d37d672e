# SPDX-License-Identifier: Apache-2.0
"""Scoring in blocks, each against what was kept so far."""

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
            "block(kvcompose:0.5)", "all pairs of all layers are compared, and there are scores of a block at a time"
        ),
    ),
)
@dataclass
class BlockPress(WrapperPress):
    """Go through the pairs in blocks: add a block to those kept so far, and let another press cut both down again.

        S = the first `kept` pairs;   for each block of `block_size` others:   S = keep(S + block)

    `block_size` is how many pairs come at a time. The working set never exceeds `kept + block_size` pairs per head, which
    bounds the memory of a scorer.

    Paper: the block-wise eviction of KeyDiff, Park et al., 2025, arXiv:2504.15364.
    Differs from the paper: the prompt is read with full attention before the first block is evicted from.
    """

    press: BasePress
    block_size: Count = 128

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        self.check_even(step)
        return replace(step, scorer=InBlocks(step.scorer, self.block_size))


@dataclass(frozen=True)
class InBlocks(ScorerAround):
    """Lets the inner scorer choose among what was kept so far and one block after the other."""

    block_size: int

    ranks: ClassVar[bool] = True

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        assert isinstance(counts, int)  # noqa: S101 - heads that differ are refused
        view, kept = scored.view, counts
        every = torch.arange(view.length, device=view.positions.device).expand(*view.shape[:2], -1)
        index = every[..., :kept]
        for start in range(kept, view.length, self.block_size):
            index = torch.cat([index, every[..., start : start + self.block_size]], dim=2)
            mask = Scored(view.pairs(index), self.inner).choose(kept)
            # The marked ones in order, without asking the device how many they are.
            index = index.gather(2, (~mask).int().argsort(dim=2, stable=True)[..., :kept])
        return torch.zeros_like(every, dtype=torch.bool).scatter(2, index, True)

    def scores(self, view: View) -> Tensor:
        raise NotImplementedError("pairs are compared block by block, so there are no scores of all of them")
