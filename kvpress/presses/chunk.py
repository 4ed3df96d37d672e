"""The same share of every stretch of the prompt."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.checks import check_count
from kvpress.context import View
from kvpress.presses.base import ScorerPress
from kvpress.presses.wrapper import WrapperPress
from kvpress.registry import register


@register("chunk", "budget", "Corallo & Papotti, 2024, arXiv:2408.00167")
@dataclass
class ChunkPress(WrapperPress):
    """Let another press choose within each chunk of stored pairs on its own.

    The n pairs of a head are cut into as few chunks of equal size as `chunk_length` allows. Of `kept` in all, the chunk from
    a to b keeps floor(kept * b / n) - floor(kept * a / n): every chunk the same share, up to rounding, and the total
    exactly. Scores that compare pairs with each other compare those of the chunk.

    Paper: after Corallo & Papotti, FINCH: Prompt-guided Key-Value Cache Compression, 2024, arXiv:2408.00167.
    Differs from the paper: the prompt is read at once; FINCH reads a chunk after the other on what it kept of those before.
    """

    press: ScorerPress
    chunk_length: int = 1024

    def validate(self) -> None:
        super().validate()
        self.check_even()
        check_count("chunk_length", self.chunk_length)

    def keep(self, group: list[View], kept: int) -> list[Tensor]:
        return [self._keep(view, min(kept, view.length)) for view in group]

    def _keep(self, view: View, kept: int) -> Tensor:
        length, masks = view.length, []
        chunks = -(-length // self.chunk_length)
        edges = [length * i // chunks for i in range(chunks + 1)]
        for start, stop in itertools.pairwise(edges):
            index = torch.arange(start, stop, device=view.positions.device).expand(*view.shape[:2], -1)
            masks += self.press.keep([view.pairs(index)], kept * stop // length - kept * start // length)
        return torch.cat(masks, dim=2)
