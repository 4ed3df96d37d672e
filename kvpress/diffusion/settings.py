# SPDX-License-Identifier: Apache-2.0
"""Schedule of masked-diffusion generation: blocks, steps, full passes, and the tokens that a step writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvpress.core.checks import Count, NotNegative, Share, check_fields

Cached = Literal["none", "prefix", "dual"]
"""Pairs that are stored around a block: none, those before it, or those before and after it."""


@dataclass(frozen=True)
class DiffusionSettings:
    """Checked arguments of `diffuse`, which documents them."""

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
            raise ValueError(f"steps={self.steps} and threshold={self.threshold} are two schedules; give one of them")
        if self.steps is not None and self.steps > self.block_length:
            raise ValueError(
                f"steps must be in [1, {self.block_length}], the block_length, as every step writes at least one token; got "
                f"{self.steps}"
            )
        if self.cache == "none" and (self.full_steps != 1 or self.refresh_every is not None):
            raise ValueError(
                "full_steps and refresh_every have no effect with cache='none': leave them out, or use cache='prefix' or "
                "'dual'"
            )

    def blocks(self, prompt: int) -> Iterator[tuple[int, int]]:
        """Yield the first position and the end of each block; the last block may be shorter."""
        end = prompt + self.new_tokens
        for first in range(prompt, end, self.block_length):
            yield first, min(first + self.block_length, end)

    def reads_all(self, step: int) -> bool:
        """Return whether a step of a block, counted from 0, reads the complete sequence."""
        if self.cache == "none" or step < self.full_steps:
            return True
        return self.refresh_every is not None and (step - self.full_steps + 1) % self.refresh_every == 0

    def written(self, step: int, length: int) -> int:
        """Return the number of tokens that a step of a fixed schedule writes: even shares, earlier steps one more."""
        steps = min(length, self.block_length if self.steps is None else self.steps)
        return length // steps + (step < length % steps)


def choose(settings: DiffusionSettings, step: int, logits: Tensor, masked: Tensor, mask_token: int) -> Tensor:
    """Return the tokens that a step writes, int64 `[B, n]`; -1 where it writes none.

    A token's confidence is its probability, in float64. The most confident tokens are written; equal ones from left to right.

    Args:
        settings: the schedule.
        step: step of the block, from 0.
        logits: `[B, n, V]`, for the token at each position.
        masked: mask of the positions without a token, bool `[B, n]`.
        mask_token: id that is never written.

    Raises:
        FloatingPointError: logits are not finite.
    """
    logits = logits.double().index_fill(2, torch.tensor([mask_token], device=logits.device), -torch.inf)
    noisy = logits
    if settings.temperature:
        uniform = torch.rand(logits.shape, dtype=torch.float64, device=logits.device).clamp_min(1e-300)
        noisy = logits / settings.temperature - (-uniform.log()).clamp_min(1e-300).log()
    tokens = noisy.argmax(dim=-1)
    confidence = logits.softmax(dim=-1).gather(2, tokens[..., None])[..., 0]
    if not bool(confidence.isfinite().all()):
        raise FloatingPointError(
            f"the logits of row {int((~confidence.isfinite()).any(dim=1).nonzero()[0])} are not finite: use float32 or "
            "bfloat16, or check the weights"
        )
    confidence = confidence.masked_fill(~masked, -1.0)
    rank = confidence.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    if settings.threshold is None:
        written = rank < settings.written(step, masked.shape[1])
    else:
        written = (confidence >= settings.threshold) | (rank == 0)
    return tokens.where(written & masked, -1)
