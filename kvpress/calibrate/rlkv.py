# SPDX-License-Identifier: Apache-2.0
"""Calibration of `rlkv`: gates of heads, trained by policy gradient on right answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.gates import Gated, GateSettings
from kvpress.core.checks import Count, NotNegative, Positive, Share, Size
from kvpress.core.model import ModelFacts


@dataclass(frozen=True)
class RLKVSettings(GateSettings):
    """Gates by policy gradient with a price on open gates, a table for `rlkv`.

        loss = -mean(advantage * log p(token)) + price * (exp(r) - 1) * mean(gates), the second term where r > `target`

    A question is a position among the last `answer` tokens of a text where the full model predicts the next token, and the
    model does not if all heads stream. In an update, the gated model continues `questions` of them, each `samples` times, by
    `length` tokens. The reward of a sample is its share of tokens that the full model predicts. Its advantage is the reward
    less the mean of its question, divided by the standard deviation; r is the mean reward.

    Paper: Du et al., Which Heads Matter for Reasoning? RL-Guided KV Cache Compression, 2025, arXiv:2510.08525.
    Differs from the paper: rewards compare with the full model's predictions instead of checking mathematics, and samples are
    short, so that training takes minutes; only answers are gated, after a prompt that is read with full attention.
    """

    method: ClassVar[str] = "rlkv"

    sink_size: Size = 16
    recent_size: Count = 64
    price: NotNegative = 0.1
    steps: Count = 200
    lr: Positive = 0.01
    target: Share = 0.5
    """Mean reward above which open gates have a price."""
    questions: Count = 8
    """Questions in an update."""
    samples: Count = 4
    """Samples of each question."""
    length: Count = 4
    """Tokens of a sample."""

    def check(self, model: ModelFacts) -> None:
        super().check(model)
        if self.length >= self.answer:
            raise ValueError(
                f"length must be below answer, whose tokens are both questions and samples; got length={self.length} and "
                f"answer={self.answer}"
            )

    def prompt(self, model: Any, attention: Gated, ids: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return `ids`, the full model's predictions `[T]`, and the positions `[n]` of questions; None without questions."""
        start = len(ids) - self.answer
        predicted = attention.read(model, ids).logits[0].argmax(dim=-1)
        starts = torch.tensor([start], device=ids.device)
        streaming = attention.follow(model, ids[None, start:], starts, gate=0.0).logits[0].argmax(dim=-1)
        needed = (predicted[start:-1] == ids[start + 1 :]) & (streaming[:-1] != ids[start + 1 :])
        begins = needed & ~torch.cat([needed.new_zeros(1), needed[:-1]])
        positions = start + begins.nonzero().flatten()
        positions = positions[positions < len(ids) - self.length]
        return (ids, predicted, positions) if len(positions) else None

    def loss(self, model: Any, attention: Gated, prompt: tuple[Tensor, ...], generator: torch.Generator) -> Tensor:
        ids, predicted, starts = prompt
        open_gates = attention.mean_gate()
        chosen = torch.randperm(len(starts), generator=generator, device=starts.device)[: self.questions]
        starts = starts[chosen].repeat_interleave(self.samples)
        answers = predicted[starts[:, None] + torch.arange(self.length, device=ids.device)]
        sampled = ids[starts, None]
        with torch.no_grad():
            for _ in range(self.length):
                logits = attention.follow(model, sampled, starts).logits[:, -1].float()
                sampled = torch.cat([sampled, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
        continuations = sampled[:, 1:]
        rewards = (continuations == answers).float().mean(dim=1)
        grouped = rewards.view(-1, self.samples)
        advantage = (
            (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, correction=0, keepdim=True) + 1e-4)
        ).view(-1, 1)
        logits = attention.follow(model, sampled[:, :-1], starts).logits.float()
        log_p: Tensor = logits.log_softmax(-1).gather(2, continuations[..., None])[..., 0]
        mean = float(rewards.mean())
        price = self.price * (math.exp(mean) - 1) if mean > self.target else 0.0
        return price * open_gates - (advantage * log_p).mean()
