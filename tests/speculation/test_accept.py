# SPDX-License-Identifier: Apache-2.0
"""Rejection sampling gives the target's distribution, whatever the draft's, and greedy decoding where there is no choice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.speculation import accept as rule
from tests.models import tiny_model, tokens

CRITICAL = {4: 23.5, 6: 27.9}
"""Chi-square that one in 10000 samples of the right distribution exceeds, by degrees of freedom."""


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Distance of counts from a distribution."""
    wanted = expected * counts.sum()
    return float(((counts - wanted) ** 2 / wanted).sum())


TARGET = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05], [0.05, 0.3, 0.3, 0.05, 0.3]])
DRAFT = torch.tensor([[0.1, 0.4, 0.1, 0.2, 0.2], [0.3, 0.3, 0.1, 0.2, 0.1]])


def emitted(rounds: int) -> list[Tensor]:
    """Counts `[row, token]` of what two rows with other distributions get at their first and second place."""
    counts = [torch.zeros(2, 5) for _ in range(2)]
    running = torch.ones(2, dtype=torch.bool)
    draft, target = DRAFT[:, None].expand(-1, 2, -1), TARGET[:, None].expand(-1, 3, -1)
    for _ in range(rounds):
        proposed = torch.stack([rule.draw(DRAFT), rule.draw(DRAFT)], dim=1)
        accepted, follows = rule.accept(proposed, draft, target, running)
        new = torch.cat([proposed[:, :accepted], follows[:, None]], dim=1)
        for place, count in enumerate(counts[: new.shape[1]]):
            count[[0, 1], new[:, place]] += 1
    return counts


def test_every_row_gets_the_distribution_of_the_target() -> None:
    for count in emitted(2500):
        for row in range(2):
            assert chi_square(count[row], TARGET[row]) < CRITICAL[4]


def test_drawing_from_the_target_after_a_rejection_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "residual", lambda target, draft: target)
    first, _ = emitted(2500)
    assert all(chi_square(first[row], TARGET[row]) > CRITICAL[4] for row in range(2))


def test_the_residual_is_what_the_draft_gives_too_little() -> None:
    expected = torch.tensor([0.4, 0.0, 0.05, 0.0, 0.0]) / 0.45
    torch.testing.assert_close(rule.residual(TARGET, DRAFT)[0], expected)
    torch.testing.assert_close(rule.residual(TARGET, TARGET), TARGET)


def test_distributions_in_one_token_are_compared() -> None:
    one = torch.eye(5)
    proposed = torch.tensor([[3, 1], [2, 4]])
    target = one[torch.tensor([[3, 0, 2], [2, 4, 1]])]
    accepted, follows = rule.accept(proposed, one[proposed], target, torch.tensor([True, True]))
    assert (accepted, follows.tolist()) == (1, [0, 4])
    accepted, follows = rule.accept(proposed, one[proposed], target, torch.tensor([False, True]))
    assert accepted == 2
    assert follows[1] == 1


def test_pulled_is_the_formula() -> None:
    torch.testing.assert_close(rule.pulled(TARGET, DRAFT, 0.0), TARGET)
    likely = DRAFT / DRAFT.max(dim=1, keepdim=True).values >= 0.6
    weights = torch.where(likely, TARGET * torch.exp(-2.0 * (TARGET - DRAFT)), TARGET)
    torch.testing.assert_close(rule.pulled(TARGET, DRAFT, 2.0, 0.6), weights / weights.sum(dim=1, keepdim=True))


WORDS, TEMPERATURE = 7, 0.5


def small(seed: int) -> tuple[object, Tensor]:
    """A model of seven words, and the exact distribution of its second new token behind a prompt."""
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


def test_sampling_keeps_the_distribution_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = small(seed=0)
    draft = kvpress.Draft(model=small(seed=3)[0], tokens=2)
    assert chi_square(sampled(model, draft), expected) < CRITICAL[6]
    monkeypatch.setattr(rule, "residual", lambda target, draft: target)
    assert chi_square(sampled(model, draft), expected) > CRITICAL[6]
