# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM: attention sinks and a recent window."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpress.core.checks import Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import ScorerPress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Exemption, Refusal, register
from kvpress.core.rerotation import closing_gaps
from kvpress.observe.view import View

_FAR = 2.0**32
"""More tokens than any text has."""


@register(
    "streaming_llm",
    "evict",
    "Xiao et al., 2023, arXiv:2309.17453",
    example="streaming_llm:0.5",
    cases=("streaming_llm:0.5",),
    refuses=(
        Refusal(
            "streaming_llm:0.5,reindex=true + kivi:bits=4,residual_length=32",
            "keys that a codec or selector has sealed cannot be rotated again; refused in the second turn",
        ),
    ),
    exempt=(
        Exemption(
            "mask oracle",
            "keys move, so hiding the evicted ones is another computation; compared with a cache numbered from zero",
            "`reindex=True`",
        ),
    ),
)
@dataclass
class StreamingLLMPress(ScorerPress):
    """Keep the first `n_sink` tokens and the newest ones, in every layer and head.

    `n_sink` is the number of first tokens that stay; the remaining budget goes to the newest ones. With `reindex`, the
    kept keys are rotated again so that their distances to the next query are those of a cache without gaps, as in the
    paper: queries keep their true position, and the sinks move up to the recent tokens.

    Paper: Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023, arXiv:2309.17453.
    Differs from the paper: the prompt is read with full attention and evicted afterwards; wrap the press in `DecodingPress`
    to keep evicting while tokens are generated. Positions are re-indexed only with `reindex=True`.
    """

    n_sink: Size = 4
    reindex: bool = False

    @property
    def protected(self) -> int:
        return self.n_sink

    def scores(self, view: View) -> Tensor:
        """Return the positions `[b, h, n]` of the pairs, and more than these for the sinks, of which the first is the best."""
        positions = view.positions.float()
        return torch.where(positions < self.n_sink, (self.n_sink - positions) * _FAR, positions)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        plain = super().recipe(model)
        return (
            replace(plain, evictions=tuple(closing_gaps(step) for step in plain.evictions)) if self.reindex else plain
        )
