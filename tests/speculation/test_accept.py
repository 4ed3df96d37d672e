# SPDX-License-Identifier: Apache-2.0
"""Rejection sampling: tokens have the target's distribution for any draft, and one-hot distributions decode greedily."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.speculation import accept as rule
from tests.models import tiny_model, tokens

CRITICAL = {4: 23.5, 6: 27.9}
"""Chi-square that one in 10000 samples of a correct distribution exceeds, by degrees of freedom."""


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Return the chi-square statistic of counts against a distribution."""
    mean = expected * counts.sum()
    return float(((counts - mean) ** 2 / mean).sum())


TARGET = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05], [0.05, 0.3, 0.3, 0.05, 0.3]])
DRAFT = torch.tensor([[0.1, 0.4, 0.1, 0.2, 0.2], [0.3, 0.3, 0.1, 0.2, 0.1]])


def emitted(rounds: int) -> list[Tensor]:
    """Return counts `[row, token]` of the first and of the second token of two rows with different distributions."""
    counts = [torch.zeros(2, 5) for _ in range(2)]
    running = torch.ones(2, dtype=torch.bool)
    draft, target = DRAFT[:, None].expand(-1, 2, -1), TARGET[:, None].expand(-1, 3, -1)
    for _ in range(rounds):
        proposed = torch.stack([rule.draw(DRAFT), rule.draw(DRAFT)], dim=1)
        accepted, next_token = rule.accept(proposed, draft, target, running)
        new = torch.cat([proposed[:, :accepted], next_token[:, None]], dim=1)
        for position, count in enumerate(counts[: new.shape[1]]):
            count[[0, 1], new[:, position]] += 1
    return counts


def test_tokens_of_every_row_have_the_distribution_of_the_target() -> None:
    for count in emitted(2500):
        for row in range(2):
            assert chi_square(count[row], TARGET[row]) < CRITICAL[4]


def test_the_statistic_detects_draws_from_the_target_after_a_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "residual", lambda target, draft: target)
    first, _ = emitted(2500)
    assert all(chi_square(first[row], TARGET[row]) > CRITICAL[4] for row in range(2))


def test_the_residual_is_the_positive_difference_of_target_and_draft() -> None:
    expected = torch.tensor([0.4, 0.0, 0.05, 0.0, 0.0]) / 0.45
    torch.testing.assert_close(rule.residual(TARGET, DRAFT)[0], expected)
    torch.testing.assert_close(rule.residual(TARGET, TARGET), TARGET)


def test_one_hot_distributions_decode_greedily() -> None:
    one_hot = torch.eye(5)
    proposed = torch.tensor([[3, 1], [2, 4]])
    target = one_hot[torch.tensor([[3, 0, 2], [2, 4, 1]])]
    accepted, next_token = rule.accept(proposed, one_hot[proposed], target, torch.tensor([True, True]))
    assert (accepted, next_token.tolist()) == (1, [0, 4])
    accepted, next_token = rule.accept(proposed, one_hot[proposed], target, torch.tensor([False, True]))
    assert accepted == 2
    assert next_token[1] == 1


def test_pulled_distributions_follow_the_formula() -> None:
    torch.testing.assert_close(rule.pulled(TARGET, DRAFT, 0.0), TARGET)
    likely = DRAFT / DRAFT.max(dim=1, keepdim=True).values >= 0.6
    weights = torch.where(likely, TARGET * torch.exp(-2.0 * (TARGET - DRAFT)), TARGET)
    torch.testing.assert_close(rule.pulled(TARGET, DRAFT, 2.0, 0.6), weights / weights.sum(dim=1, keepdim=True))


WORDS, TEMPERATURE = 7, 0.5


def small(seed: int) -> tuple[object, Tensor]:
    """Return a model with seven tokens, and the exact distribution of its second new token after a prompt."""
    config = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 1, "pad_token_id": 0}
    model = tiny_model("llama", seed=seed, **config)
    first = torch.arange(WORDS)[:, None]
    logits = model(torch.cat([(tokens(1, 12) % WORDS).expand(WORDS, -1), first], dim=1)).logits[:, 11:] / TEMPERATURE
    before, after = torch.softmax(logits, dim=-1).unbind(1)
    return model, (before.gather(1, first) * after).sum(dim=0)


def sampled(model: object, draft: object) -> Tensor:
    """Count the second tokens that are generated."""
    prompt = (tokens(1, 12) % WORDS).expand(64, -1)
    settings = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "max_new_tokens": 4}
    runs = [kvpress.speculate(model, prompt, draft=draft, **settings).sequences[:, 13] for _ in range(10)]
    return torch.bincount(torch.cat(runs), minlength=WORDS).float()


def test_sampled_tokens_have_the_distribution_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = small(seed=0)
    draft = kvpress.Draft(model=small(seed=3)[0], tokens=2)
    assert chi_square(sampled(model, draft), expected) < CRITICAL[6]
    monkeypatch.setattr(rule, "residual", lambda target, draft: target)
    assert chi_square(sampled(model, draft), expected) > CRITICAL[6]
