# SPDX-License-Identifier: Apache-2.0
"""Layer budgets and scores of CAKE, found again from the model's own attention weights."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress import CAKEPress
from kvpress.presses.cake import share_out
from tests.caches import generate, positions, prefill
from tests.models import full_layers, padded_batch, tiny_model, tokens
from tests.presses.test_scores import FAMILIES, weights

LENGTH, WINDOW = 48, 8
RECENT = list(range(LENGTH - WINDOW, LENGTH))


def by_hand(total: int, preferences: list[float], room: list[int]) -> list[int]:
    """Shares of `total` in exact arithmetic: fill up the fullest one after the other, then round."""
    weights = [Fraction(preference) for preference in preferences]
    full: set[int] = set()
    while True:
        free = [i for i in range(len(room)) if i not in full]
        remaining = total - sum(room[i] for i in full)
        exact_shares = [
            Fraction(room[i]) if i in full else remaining * weights[i] / sum(weights[j] for j in free)
            for i in range(len(room))
        ]
        over = [i for i in free if exact_shares[i] > room[i]]
        if not over:
            break
        full |= set(over)
    shares = [math.floor(p) for p in exact_shares]
    for i in sorted(range(len(room)), key=lambda i: shares[i] - exact_shares[i])[: total - sum(shares)]:
        shares[i] += 1
    return shares


def replay(model: Any, ids: Tensor, press: CAKEPress) -> list[tuple[int, list[list[int]]]]:
    """Budget of every layer that grows beside its window, and the older positions of each head, best first; for one row."""
    preferences, ranked = [], []
    for layer in full_layers(model):
        paid = weights(model, ids)[layer][0, :, -WINDOW:, :-WINDOW].double()
        dispersion = -(paid * (paid + 1e-300).log()).sum()
        shift = paid.var(dim=1)
        preferences.append(float(dispersion ** (1 / press.tau1) * shift.sum() ** (1 / press.tau2)))
        scores = torch.nn.functional.avg_pool1d(paid.mean(dim=1) + press.gamma * shift, press.kernel_size, 1, 2)
        ranked.append(scores.view(2, -1, LENGTH - WINDOW).mean(dim=1).argsort(dim=-1, descending=True).tolist())
    layers = len(preferences)
    total = layers * (press.amount.of(LENGTH) - WINDOW)
    return list(zip(by_hand(total, preferences, [LENGTH - WINDOW] * layers), ranked, strict=True))


@pytest.mark.parametrize("settings", [{}, {"tau1": 1.6, "tau2": 0.4, "gamma": 5.0}], ids=["plain", "tempered"])
@pytest.mark.parametrize("family", FAMILIES)
def test_budgets_and_pairs_from_eager_attention(family: str, settings: dict[str, float]) -> None:
    model, ids = tiny_model(family, "eager"), tokens(2, LENGTH)
    press = CAKEPress(0.5, window_size=WINDOW, **settings)
    kept_pairs = positions(prefill(model, press, ids))
    for row in range(2):
        expected = replay(model, ids[row : row + 1], press)
        for layer, (budget, heads) in zip(full_layers(model), expected, strict=True):
            assert kept_pairs[layer][row] == [sorted(head[:budget]) + RECENT for head in heads]
        kept = sum(len(kept_pairs[layer][row][0]) for layer in full_layers(model))
        assert kept == len(full_layers(model)) * (LENGTH // 2)
    assert len({len(row[0]) for layer in full_layers(model) for row in kept_pairs[layer]}) > 1


def test_a_cascade_ends_with_the_same_pairs() -> None:
    """Shrink the layers read so far after every layer, as the paper does, always to a prefix of their ranking."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        preferences, layers, room = torch.rand(6, generator=generator).double() ** 4, 6, 40
        total = int(torch.randint(6, layers * room, (1,), generator=generator))
        ranked = [torch.randperm(room, generator=generator).tolist() for _ in range(layers)]
        kept_pairs: list[list[int]] = []
        for layer in range(layers):
            kept_pairs.append(ranked[layer])
            budgets = share_out(total, preferences[: layer + 1], torch.tensor([room] * (layer + 1)))
            # A layer that was rounded up before may be rounded down now; a cascade cannot restore its pair.
            kept_pairs = [kept[:budget] for kept, budget in zip(kept_pairs, budgets, strict=True)]
        final = share_out(total, preferences, torch.tensor([room] * layers))
        for kept, order, budget in zip(kept_pairs, ranked, final, strict=True):
            assert kept == order[: len(kept)]
            assert budget - 1 <= len(kept) <= budget


@pytest.mark.parametrize("seed", range(30))
def test_shares_add_up_and_fit(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layers = int(torch.randint(1, 9, (1,), generator=generator))
    preferences = torch.rand(layers, generator=generator).double() ** 3
    room = torch.randint(0, 40, (layers,), generator=generator)
    total = int(torch.randint(0, int(room.sum()) + 1, (1,), generator=generator))
    shares = share_out(total, preferences, room)
    assert shares == by_hand(total, preferences.tolist(), room.tolist())
    assert sum(shares) == total
    assert all(0 <= share <= limit for share, limit in zip(shares, room.tolist(), strict=True))


@pytest.mark.parametrize(
    ("total", "preferences", "room", "expected"),
    [(10, [0.0, 0.0], [9, 9], [5, 5]), (7, [0.0, 3.0], [9, 4], [3, 4]), (99, [1.0, 2.0], [3, 4], [3, 4]),
     (1, [1.0, 1.0, 1.0], [5, 5, 5], [1, 0, 0]), (6, [1e-200, 1.0], [9, 5], [1, 5]), (0, [1.0, 2.0], [3, 4], [0, 0])],
)  # fmt: skip
def test_shares_at_the_edges(total: int, preferences: list[float], room: list[int], expected: list[int]) -> None:
    assert share_out(total, torch.tensor(preferences).double(), torch.tensor(room)) == expected


def lengths(spec: str, family: str = "llama", new: int = 1) -> list[list[list[int]]]:
    """Pairs that every head holds after a padded prompt, `[layer][row][head]`; padding is not held."""
    model = tiny_model(family)
    with kvpress.get_press(spec)(model):
        cache = generate(model, *padded_batch([48, 31, 20]), max_new_tokens=new).past_key_values
    return [[[len(head) for head in row] for row in layer] for layer in positions(cache)]


def test_rows_share_out_on_their_own_and_exactly() -> None:
    counts = lengths("cake:0.5,window_size=4")
    for row, length in enumerate((48, 31, 20)):
        assert sum(counts[layer][row][0] for layer in range(3)) == 3 * int(length * 0.5)
    assert (
        len({tuple(counts[layer][row][0] / length for layer in range(3)) for row, length in enumerate((48, 31, 20))})
        == 3
    )


@pytest.mark.parametrize("wrapper", ["adakv", "critical_adakv"])
def test_heads_compete_for_the_budget_of_their_layer(wrapper: str) -> None:
    plain, heads = lengths("cake:0.5,window_size=4"), lengths(f"{wrapper}(cake:0.5,window_size=4)")
    assert [[sum(row) for row in layer] for layer in heads] == [[sum(row) for row in layer] for layer in plain]
    assert any(row[0] != row[1] for layer in heads for row in layer)


@pytest.mark.parametrize("wrapper", ["criticalkv", "chunkkv", "block", "key_rerotation", "chunk"])
def test_wrappers_keep_the_budgets(wrapper: str) -> None:
    assert lengths(f"{wrapper}(cake:0.5,window_size=4)") == lengths("cake:0.5,window_size=4")


def test_ratios_of_layers_go_before_budgets() -> None:
    for inner in ("cake:window_size=4", "adakv(cake:window_size=4)"):
        counts = lengths(f"per_layer_compression({inner}):compression_ratios=(0.25,0.5,0.75)")
        for layer, ratio in enumerate((0.25, 0.5, 0.75)):
            assert [sum(row) for row in counts[layer]] == [2 * int(n * (1 - ratio)) for n in (48, 31, 20)]


def test_heads_that_differ_in_length_are_layers_of_their_own() -> None:
    counts = lengths("adakv(knorm:0.2) + cake:0.5,window_size=4")
    for row, length in enumerate((48, 31, 20)):
        assert sum(sum(layer[row]) for layer in counts) == 6 * int(int(length * 0.8) * 0.5)


def test_while_tokens_are_generated_the_target_is_the_mean_of_the_layers() -> None:
    counts = lengths("decoding(cake:window_size=4):compression_interval=4,target_size=16", new=9)
    assert [sum(counts[layer][row][0] for layer in range(3)) for row in range(3)] == [3 * 16] * 3
    assert len({counts[layer][0][0] for layer in range(3)}) > 1


@pytest.mark.parametrize("wrapper", ["adakv", "critical_adakv"])
def test_layers_whose_heads_differ_count_head_by_head_beside_those_whose_heads_do_not(wrapper: str) -> None:
    """Heads that compete differ in length in some layers and, now and then, not in others."""
    model = tiny_model("llama")
    press = kvpress.get_press(f"decoding({wrapper}(cake:window_size=8)):compression_interval=1,target_size=14")
    cache = DynamicCache(config=model.config)
    with press(model):
        model(tokens(2, 70), past_key_values=cache)
        for seed in range(24):
            model(tokens(2, 1, seed=seed), past_key_values=cache)
            counts = torch.tensor([layer.store.stored() for layer in cache.layers]).unflatten(1, (2, 2))
            assert counts.sum(dim=(0, 2)).tolist() == [3 * 2 * 14] * 2


def test_a_budget_below_the_window_keeps_the_newest() -> None:
    kept_pairs = positions(prefill(tiny_model("llama"), CAKEPress(budget=5), tokens(2, 20)))
    assert kept_pairs == [[[[15, 16, 17, 18, 19]] * 2] * 2] * 3


def test_one_query_has_no_shift_and_layers_share_evenly() -> None:
    kept_pairs = positions(prefill(tiny_model("llama"), CAKEPress(0.5, window_size=1), tokens(2, 20)))
    assert {len(head) for layer in kept_pairs for row in layer for head in row} == {10}


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_ratio_of_zero_is_no_press(family: str) -> None:
    model = tiny_model(family)
    for ids, mask in ((tokens(2, LENGTH), None), padded_batch([LENGTH, 20, 9])):
        expected = generate(model, ids, mask).sequences
        with CAKEPress(0.0)(model):
            assert torch.equal(generate(model, ids, mask).sequences, expected)


def test_before_a_codec() -> None:
    model, ids = tiny_model("llama"), tokens(2, LENGTH)
    alone = positions(prefill(model, CAKEPress(0.3, window_size=4), ids))
    for codec in ("kivi:bits=4,residual_length=32", "kivi:bits=4,group_size=4,residual_length=4"):
        with (CAKEPress(0.3, window_size=4) + kvpress.get_press(codec))(model):
            cache = generate(model, ids).past_key_values
        assert [[[head[:-7] for head in row] for row in layer] for layer in positions(cache)] == alone


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"gamma": -1.0}, "gamma must be >= 0, got -1.0"), ({"tau1": 0.0}, "tau1 must be > 0, got 0.0"),
     ({"tau2": float("nan")}, "tau2 must be > 0, got nan"), ({"window_size": 0}, "window_size must be >= 1"),
     ({"kernel_size": 4}, "kernel_size must be odd")],
)  # fmt: skip
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CAKEPress(0.5, **settings)
