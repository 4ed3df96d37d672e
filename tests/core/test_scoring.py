# SPDX-License-Identifier: Apache-2.0
"""Invalid scores and choices of users' classes are refused, with their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.core.scoring import Scored
from kvpress.observe.view import View
from kvpress.presses.adakv import AdaKVPress
from tests.models import tiny_model, tokens


@dataclass
class Given(kvpress.ScorerPress):
    """Scores by position, changed by `spoil`; `mask` changes the chosen pairs."""

    spoil: Callable[[Tensor, int], Any] = lambda scores, layer: scores
    mask: Callable[[Tensor], Any] = lambda mask: mask

    def scores(self, view: View) -> Tensor:
        changed: Tensor = self.spoil(view.positions.float(), view.layer)
        return changed

    def choose(self, scored: Scored, counts: int | Tensor) -> Tensor:
        changed: Tensor = self.mask(super().choose(scored, counts))
        return changed


@dataclass
class GivenAsBefore(kvpress.ScorerPress):
    """The same scores, with the arguments of NVIDIA kvpress."""

    spoil: Callable[[Tensor, int], Any] = lambda scores, layer: scores

    def score(self, module: Any, hidden_states: Any, keys: Tensor, values: Any, attentions: Any, kwargs: Any) -> Any:
        return self.spoil(torch.arange(keys.shape[2]).expand(keys.shape[:3]).float(), module.layer_idx)


def one_nan(scores: Tensor, layer: int) -> Tensor:
    """Set NaN at one position of the second head of the second layer, in the last row."""
    scores = scores.clone()
    if layer == 1:
        scores[-1, 1, 5] = torch.nan
    return scores


def run(press: Any, mask: Tensor | None = None) -> None:
    model = tiny_model("llama")
    with torch.inference_mode(), press(model):
        model(tokens(2, 16), attention_mask=mask)


WRAPPERS = {
    "bare": lambda press: press,
    "adakv": AdaKVPress,
    "sample": kvpress.SamplePress,
    "criticalkv": kvpress.CriticalKVPress,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("kind", [Given, GivenAsBefore])
def test_nan_is_named(kind: Any, wrap: Any) -> None:
    """The message names the class, layer, row, head and token; padding on the left does not shift positions."""
    with pytest.raises(FloatingPointError, match=f"{kind.__name__}, layer 1, row 1, head 1, position 5"):
        run(wrap(kind(0.5, spoil=one_nan)))
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, :3] = 0  # rows are then scored one by one, and the first row raises
    with pytest.raises(FloatingPointError, match=f"{kind.__name__}, layer 1, row 0, head 1, position 5"):
        run(wrap(kind(0.5, spoil=one_nan)), mask)


@pytest.mark.parametrize("sign", [1, -1])
def test_infinite_scores_are_an_order(sign: int) -> None:
    """Pairs scored inf stay; pairs scored -inf are evicted first."""

    def spoil(scores: Tensor, layer: int) -> Tensor:
        return scores.index_fill(-1, torch.tensor([3, 12]), sign * torch.inf)

    model = tiny_model("llama")
    press = Given(0.5, spoil=spoil)
    with torch.inference_mode(), press(model):
        cache = model(tokens(2, 16)).past_key_values
    kept = set(cache.layers[0].store.sealed[0].slots().tolist())
    assert kept & {3, 12} == ({3, 12} if sign > 0 else set())


@pytest.mark.parametrize("kind", [Given, GivenAsBefore])
def test_wrong_shape_is_named(kind: Any) -> None:
    wrong = r"one score for each pair, of shape \(2, 2, 16\) .* in layer 0, got \(2, 2, 15\)"
    with pytest.raises(ValueError, match=f"{kind.__name__} must return {wrong}"):
        run(kind(0.5, spoil=lambda scores, layer: scores[..., 1:]))
    with pytest.raises(TypeError, match=f"{kind.__name__} must return scores as a tensor .* got NoneType"):
        run(kind(0.5, spoil=lambda scores, layer: None))


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (
            lambda mask: mask[..., 1:],
            ValueError,
            r"Given.choose must return a mask of shape \(2, 2, 16\), got \(2, 2, 15\)",
        ),
        (
            lambda mask: mask.nonzero(),
            TypeError,
            r"Given.choose must return a mask, torch.bool \(2, 2, 16\), got torch.int64",
        ),
        (lambda mask: None, TypeError, r"Given.choose must return a mask, .*, got NoneType"),
    ],
)
def test_wrong_choice_is_named(mask: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        run(Given(0.5, mask=mask))


def test_nan_of_a_users_compress_is_named() -> None:
    @dataclass
    class Halves(kvpress.BasePress):
        def compress(self, module: Any, hidden: Any, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any) -> Any:
            return keys[:, :, ::2] * torch.nan, values[:, :, ::2]

    with pytest.raises(
        FloatingPointError, match="NaN in keys returned by `compress` of layer 0, row 0, head 0, token 0"
    ):
        run(Halves())
