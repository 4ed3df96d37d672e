# SPDX-License-Identifier: Apache-2.0
"""LagKV, CUR and CAPKV against loops over tokens, and the sinks of StreamingLLM."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import kvpress
from tests.models import tiny_model, tokens
from tests.presses.scoring import one_view


def lag_worth(part: Tensor, reference: Tensor) -> Tensor:
    """Softmax of the spread of each row of `part [lag, D]`, scaled channel by channel to the reference's range."""
    spreads = []
    for row in part:
        relative = [
            (float(x) - float(column.min())) / (float(column.max()) - float(column.min()))
            for x, column in zip(row, reference.T, strict=True)
        ]
        mean = sum(relative) / len(relative)
        spreads.append(math.sqrt(sum((x - mean) ** 2 for x in relative) / len(relative)))
    return torch.softmax(torch.tensor(spreads), dim=0)


@pytest.mark.parametrize("cross", [False, True])
def test_lagkv_compares_each_lag_with_the_next(cross: bool) -> None:
    sinks, lag = 3, 7
    press = kvpress.LagKVPress(0.6, n_sink=sinks, lag_size=lag, cross_scoring=cross)
    view, scores = one_view(tiny_model("llama"), press, tokens(1, 40))
    lags = (40 - sinks) // lag
    for head in range(2):
        for number in range(lags - 1):
            start = sinks + number * lag
            current, next_lag = slice(start, start + lag), slice(start + lag, start + 2 * lag)
            worth = (
                sum(
                    lag_worth(tensor[0, head, current], tensor[0, head, next_lag])
                    for tensor in (view.keys, view.values)
                )
                / 2
            )
            actual = scores[0, head, current]
            assert torch.equal(actual.argsort(), worth.argsort())
            expected = worth if cross else worth.argsort().argsort() / lag
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
        newest = scores[0, head, sinks + (lags - 1) * lag :]
        assert bool((newest > 1).all())
        assert bool((newest.diff() > 0).all())
        assert bool(scores[0, head, :sinks].isposinf().all())


def test_lagkv_keeps_the_newest_of_a_prompt_of_less_than_two_lags() -> None:
    model = tiny_model("llama")
    with kvpress.LagKVPress(0.5, n_sink=2, lag_size=20)(model) as session:
        model.generate(tokens(2, 41), max_new_tokens=1)
    assert kvpress.kept_positions(session.cache)[0][1][0].tolist() == [0, 1, *range(23, 41)]


def test_channels_without_range_count_as_nothing() -> None:
    keys = torch.randn(1, 2, 12, 8)
    keys[..., 3] = 1.0
    press = kvpress.LagKVPress(0.5, n_sink=0, lag_size=4)
    assert bool(press.score(None, None, keys, keys, None, {}).isfinite().all())  # type: ignore[arg-type]


@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize("kind", ["key", "value", "kv_avg", "kv_product"])
def test_cur_is_the_share_of_squared_norms(kind: str, local: bool) -> None:
    width = 6
    press = kvpress.CURPress(
        0.5,
        num_sinks=2,
        leverage_type=kind,
        use_local_approximation=local,
        local_window_size=width,  # type: ignore[arg-type]
    )
    view, scores = one_view(tiny_model("llama"), press, tokens(1, 40))

    def shares(vectors: Tensor) -> list[float]:
        sizes = [float((row**2).sum()) for row in vectors]
        windows = [range(t - t % width, min(t - t % width + width, 40)) if local else range(40) for t in range(40)]
        return [size / sum(sizes[i] for i in window) for size, window in zip(sizes, windows, strict=True)]

    for head in range(2):
        a, b = torch.tensor(shares(view.keys[0, head])), torch.tensor(shares(view.values[0, head]))
        worth = {"key": a, "value": b, "kv_avg": (a + b) / 2, "kv_product": a * b}[kind]
        torch.testing.assert_close(scores[0, head, 2:], (worth / worth.sum())[2:], atol=1e-6, rtol=1e-4)
        assert bool(scores[0, head, :2].isposinf().all())


def test_random_projections_are_the_same_in_every_run() -> None:
    press = kvpress.CURPress(0.5, use_random_leverage=True)
    (_, first_scores), (_, second_scores) = (one_view(tiny_model("llama"), press, tokens(1, 40)) for _ in range(2))
    assert torch.equal(first_scores, second_scores)


def test_cap_scores_by_the_capacity_of_values() -> None:
    model, ids, sinks = tiny_model("llama"), tokens(1, 40), 3
    settings = {"n_future_positions": 16, "n_sink": sinks}
    view, scores = one_view(model, kvpress.CapPress(0.5, tau=2.0, epsilon=1e-3, **settings), ids)  # type: ignore[arg-type]
    module = model.model.layers[0].self_attn
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
    mean = module.q_proj(hidden).detach().view(40, 4, 32)[sinks:].mean(dim=0)
    cos, sin = (part[0].mean(dim=0) for part in model.model.rotary_emb(hidden, torch.arange(40, 56)[None]))
    anchors = mean * cos + torch.cat([-mean[:, 16:], mean[:, :16]], dim=1) * sin
    for head in range(2):
        keys, values = view.keys[0, head, sinks:].double(), view.values[0, head, sinks:].double()
        expected = torch.zeros(40 - sinks, dtype=torch.float64)
        for query in anchors[2 * head : 2 * head + 2].double():
            cosines = torch.stack([key @ query / (key.norm() * query.norm()) for key in keys])
            weights = (2.0 * (cosines - cosines.max())).exp()
            capacity = torch.eye(32).double() + sum(
                (w + 1e-3) * v[:, None] * v for w, v in zip(weights, values, strict=True)
            )
            inverse = torch.linalg.inv(capacity)
            expected += torch.stack([w * (v @ inverse @ v) for w, v in zip(weights, values, strict=True)]) / 2
        torch.testing.assert_close(scores[0, head, sinks:], expected.float(), atol=1e-5, rtol=1e-3)
        assert bool(scores[0, head, :sinks].isposinf().all())


@pytest.mark.parametrize(("budget", "kept"), [(3, [0, 1, 2]), (4, [0, 1, 2, 3]), (6, [0, 1, 2, 3, 39, 40])])
def test_streaming_llm_keeps_the_first_sinks_first(budget: int, kept: list[int]) -> None:
    with kvpress.StreamingLLMPress(budget=budget)(tiny_model("llama")) as session:
        session.model.generate(tokens(1, 41), max_new_tokens=1)
    assert kvpress.kept_positions(session.cache)[0][0][0].tolist() == kept
