# SPDX-License-Identifier: Apache-2.0
"""How a masked-diffusion model writes: blocks, steps, what is read anew, and which tokens a step writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvpress.core.checks import Count, NotNegative, Share, check_fields

Cached = Literal["none", "prefix", "dual"]


@dataclass(frozen=True)
class Settings:
    """What `diffuse` is told, checked; its docstring says what each means."""

    new_tokens: Count
    block_length: Count
    steps: Count | None
    threshold: Share | None
    temperature: NotNegative
    cache: Cached
    full_steps: Count
    refresh_every: Count | None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.steps is not None and self.threshold is not None:
            raise ValueError(
                f"steps={self.steps} is a fixed schedule, and threshold={self.threshold} lets confidence decide: give one"
            )
        if self.steps is not None and self.steps > self.block_length:
            raise ValueError(
                f"steps must be in [1, {self.block_length}], the block_length, as every step writes at least one token; got "
                f"{self.steps}"
            )
        if self.cache == "none" and (self.full_steps != 1 or self.refresh_every is not None):
            raise ValueError(
                "full_steps and refresh_every say when a cache is filled, and cache='none' has none: leave them out, or use "
                "cache='prefix' or 'dual'"
            )

    def blocks(self, prompt: int) -> Iterator[tuple[int, int]]:
        """Yield where each block begins and ends; the last one may be shorter."""
        end = prompt + self.new_tokens
        for first in range(prompt, end, self.block_length):
            yield first, min(first + self.block_length, end)

    def reads_all(self, step: int) -> bool:
        """Whether a step of a block, counted from 0, reads the whole sequence."""
        if self.cache == "none" or step < self.full_steps:
            return True
        return self.refresh_every is not None and (step - self.full_steps + 1) % self.refresh_every == 0

    def written(self, step: int, length: int) -> int:
        """How many tokens a step of a fixed schedule writes in a block: even shares, the earlier steps those left over."""
        steps = min(length, self.block_length if self.steps is None else self.steps)
        return length // steps + (step < length % steps)


def choose(settings: Settings, step: int, logits: Tensor, masked: Tensor, mask_token: int) -> Tensor:
    """Return what the positions `masked [B, n]` become after a step, int64 `[B, n]`: a token, or -1 where nothing is written.

    `logits [B, n, V]` are those of each position's own token. The confidence of a token is its probability, in float64; the
    surest are written, of equal ones the earlier.
    """
    logits = logits.double().index_fill(2, torch.tensor([mask_token], device=logits.device), -torch.inf)
    drawn = logits
    if settings.temperature:
        uniform = torch.rand(logits.shape, dtype=torch.float64, device=logits.device).clamp_min(1e-300)
        drawn = logits / settings.temperature - (-uniform.log()).clamp_min(1e-300).log()
    tokens = drawn.argmax(dim=-1)
    sure = logits.softmax(dim=-1).gather(2, tokens[..., None])[..., 0]
    if not bool(sure.isfinite().all()):
        raise FloatingPointError(
            f"the logits of row {int((~sure.isfinite()).any(dim=1).nonzero()[0])} are not finite, so nothing can be chosen: "
            "use float32 or bfloat16, or look at the weights"
        )
    sure = sure.masked_fill(~masked, -1.0)
    rank = sure.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    if settings.threshold is None:
        written = rank < settings.written(step, masked.shape[1])
    else:
        written = (sure >= settings.threshold) | (rank == 0)
    return tokens.where(written & masked, -1)
