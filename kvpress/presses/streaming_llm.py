"""Attention sinks and a recent window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvpress.checks import check_count
from kvpress.context import View
from kvpress.presses.base import ScorerPress, view_of
from kvpress.presses.evict import Moved, close_gaps
from kvpress.registry import register


@register("streaming_llm", "evict", "Xiao et al., 2023, arXiv:2309.17453")
@dataclass
class StreamingLLMPress(ScorerPress):
    """Keep the first `n_sink` tokens and the newest ones, in every layer and head.

    With `reindex`, the kept keys are turned so that their distances to the next query are those of a cache without
    gaps, as in the paper: queries keep their true position, and the sinks move up behind the recent tokens.

    Paper: Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023, arXiv:2309.17453.
    Differs from the paper: the prompt is read with full attention and evicted afterwards; put the press into
    `DecodingPress` to keep evicting while tokens are generated. Positions are re-indexed only with `reindex=True`.
    """

    n_sink: int = 4
    reindex: bool = False

    def validate(self) -> None:
        super().validate()
        check_count("n_sink", self.n_sink, least=0)

    @property
    def protected(self) -> int:
        return self.n_sink

    def score(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor,
        attentions: Tensor | None, kwargs: dict,
    ) -> Tensor:  # fmt: skip
        """Return the position of each pair, and infinity for the sinks."""
        positions = view_of(kwargs).positions.float()
        return positions.masked_fill(positions < self.n_sink, torch.inf)

    def moved(self, view: View, mask: Tensor) -> Moved | None:
        return close_gaps(view, mask) if self.reindex else None
