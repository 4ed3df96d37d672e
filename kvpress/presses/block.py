"""Scoring in blocks, each against what was kept so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.checks import check_count
from kvpress.context import View
from kvpress.presses.base import ScorerPress
from kvpress.presses.wrapper import WrapperPress
from kvpress.registry import register


@register("block", "evict", "Park et al., 2025, arXiv:2504.15364")
@dataclass
class BlockPress(WrapperPress):
    """Go through the pairs in blocks: add a block to those kept so far, and let another press cut both down again.

        S = the first `kept` pairs;   for each block of `block_size` others:   S = keep(S + block)

    `block_size` is how many pairs come at a time. The working set never exceeds `kept + block_size` pairs per head, which
    bounds the memory of a scorer.

    Paper: the block-wise eviction of KeyDiff, Park et al., 2025, arXiv:2504.15364.
    Differs from the paper: the prompt is read with full attention before the first block is evicted from.
    """

    press: ScorerPress
    block_size: int = 128

    def validate(self) -> None:
        super().validate()
        self.check_even()
        check_count("block_size", self.block_size)

    def keep(self, group: list[View], kept: int) -> list[Tensor]:
        return [self._keep(view, min(kept, view.length)) for view in group]

    def _keep(self, view: View, kept: int) -> Tensor:
        every = torch.arange(view.length, device=view.positions.device).expand(*view.shape[:2], -1)
        index = every[..., :kept]
        for start in range(kept, view.length, self.block_size):
            index = torch.cat([index, every[..., start : start + self.block_size]], dim=2)
            mask = self.press.keep([view.pairs(index)], kept)[0]
            # The marked ones in order, without asking the device how many they are.
            index = index.gather(2, (~mask).int().argsort(dim=2, stable=True)[..., :kept])
        return torch.zeros_like(every, dtype=torch.bool).scatter(2, index, True)
