# SPDX-License-Identifier: Apache-2.0
"""Which heads carry answers, by reinforcement learning: gates that are worth their price in right answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.gates import Gated, GateSettings
from kvpress.core.checks import Count, NotNegative, Positive, Share, Size


@dataclass(frozen=True)
class RLKVSettings(GateSettings):
    """Gates by policy gradient with a price on open ones, a table for `rlkv`.

        loss = -mean(advantage * log p(token)) + price * (exp(r) - 1) * mean(gates), the second term where r > `target`

    Questions are found in the text: places among its `answer` last tokens where the full model is right about the next
    token and one whose heads all stream is wrong. From `questions` of them at a time, each `samples` times, the gated model
    draws `length` tokens; the reward of a draw is the share of them that the full model would have said, its advantage the
    reward less the mean of its question, divided by the deviation; r is the mean reward.

    Paper: Du et al., Which Heads Matter for Reasoning? RL-Guided KV Cache Compression, 2025, arXiv:2510.08525.
    Differs from the paper: rewards compare with the full model's own words instead of checking mathematics, and draws are
    of few tokens, so that minutes do; only answers are gated, behind a prompt that was read in full.
    """

    method: ClassVar[str] = "rlkv"

    sink_size: Size = 16
    recent_size: Count = 64
    price: NotNegative = 0.1
    steps: Count = 200
    lr: Positive = 0.01
    target: Share = 0.5
    questions: Count = 8
    samples: Count = 4
    length: Count = 4

    def prompt(self, model: Any, attention: Gated, ids: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return `ids`, what the full model says after every one of them, `[T]`, and the places `[n]` where questions end."""
        start = len(ids) - self.answer
        right = attention.read(model, ids).logits[0].argmax(dim=-1)
        behind = torch.tensor([start], device=ids.device)
        streaming = attention.follow(model, ids[None, start:], behind, gate=0.0).logits[0].argmax(dim=-1)
        needed = (right[start:-1] == ids[start + 1 :]) & (streaming[:-1] != ids[start + 1 :])
        begins = needed & ~torch.cat([needed.new_zeros(1), needed[:-1]])
        places = start + begins.nonzero().flatten()
        places = places[places < len(ids) - self.length]
        return (ids, right, places) if len(places) else None

    def loss(self, model: Any, attention: Gated, prompt: tuple[Tensor, ...], generator: torch.Generator) -> Tensor:
        ids, right, starts = prompt
        open_gates = attention.gates.mean()
        chosen = torch.randperm(len(starts), generator=generator, device=starts.device)[: self.questions]
        starts = starts[chosen].repeat_interleave(self.samples)
        answers = right[starts[:, None] + torch.arange(self.length, device=ids.device)]
        drawn = ids[starts, None]
        with torch.no_grad():
            for _ in range(self.length):
                logits = attention.follow(model, drawn, starts).logits[:, -1].float()
                drawn = torch.cat([drawn, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
        said = drawn[:, 1:]
        rewards = (said == answers).float().mean(dim=1)
        each = rewards.view(-1, self.samples)
        advantage = ((each - each.mean(1, keepdim=True)) / (each.std(1, correction=0, keepdim=True) + 1e-4)).view(-1, 1)
        logits = attention.follow(model, drawn[:, :-1], starts).logits.float()
        log_p = logits.log_softmax(-1).gather(2, said[..., None])[..., 0]
        mean = float(rewards.mean())
        price = self.price * (math.exp(mean) - 1) if mean > self.target else 0.0
        return price * open_gates - (advantage * log_p).mean()
