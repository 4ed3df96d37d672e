# SPDX-License-Identifier: Apache-2.0
"""KVCrush: signatures, distances and representatives, number by number from the scores of the inner press."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.presses.kvcrush import Representatives, at_even_steps
from tests.caches import prefill
from tests.models import padded_batch, tiny_model, tokens
from tests.presses.scoring import one_view

LENGTH, WINDOW = 60, 6
ANCHORS = {"zeros": [0, 0], "ones": [1, 1], "alternate": [0, 1]}


def expected(scores: Tensor, anchor: list[int], count: int, share: float) -> list[list[int]]:
    """Kept ranks of each head, for scores `[H, n]` of one row whose heads store the same tokens."""
    heads, length = scores.shape
    halves = [set(scores[h].argsort(descending=True)[: length // 2].tolist()) for h in range(heads)]
    distance = [sum((t in halves[h]) != bool(anchor[h]) for h in range(heads)) for t in range(length)]
    kept = []
    for h in range(heads):
        free = count - int(scores[h].isinf().sum())
        num_others = round(share * max(0, free))
        best = scores[h].argsort(descending=True)[: count - num_others].tolist()
        others = sorted(set(range(length)) - set(best), key=lambda t: (distance[t], t))
        chosen = [
            t
            for r, t in enumerate(others)
            if round_half_up((r + 1) * num_others / len(others)) > round_half_up(r * num_others / len(others))
        ]
        assert len(chosen) == num_others
        kept.append(sorted(best + chosen))
    return kept


def round_half_up(number: float) -> int:
    return int(number + 0.5)


@pytest.mark.parametrize("anchor", ANCHORS)
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("inner", [f"snapkv:0.6,window_size={WINDOW}", "keydiff:0.6"])
def test_best_pairs_and_representatives_stay(inner: str, share: float, anchor: str) -> None:
    model, ids = tiny_model("llama"), tokens(2, LENGTH)
    cache = prefill(model, kvpress.get_press(f"kvcrush({inner}):share={share},anchor={anchor}"), ids)
    for layer, positions in enumerate(kvpress.kept_positions(cache)):
        _, scores = one_view(model, kvpress.get_press(inner), ids, layer)
        for row in range(2):
            ranks = expected(scores[row], ANCHORS[anchor], LENGTH - int(LENGTH * 0.6), share)
            assert [head.tolist() for head in positions[row]] == ranks


def test_share_zero_is_the_inner_press_and_a_share_acts() -> None:
    model, ids = tiny_model("llama"), tokens(1, LENGTH)
    inner, none, some = (
        kvpress.kept_positions(prefill(model, kvpress.get_press(spec), ids))
        for spec in ("knorm:0.5", "kvcrush(knorm:0.5):share=0", "kvcrush(knorm:0.5)")
    )
    for layer in range(3):
        for head in range(2):
            assert torch.equal(inner[layer][0][head], none[layer][0][head])
            assert len(some[layer][0][head]) == len(none[layer][0][head])
            assert not torch.equal(some[layer][0][head], none[layer][0][head])


def test_the_window_of_the_inner_press_stays_at_any_share() -> None:
    ids = tokens(1, LENGTH)
    press = kvpress.get_press(f"kvcrush(snapkv:0.7,window_size={WINDOW}):share=1.0")
    for layer in kvpress.kept_positions(prefill(tiny_model("llama"), press, ids)):
        assert all(head[-WINDOW:].tolist() == list(range(LENGTH - WINDOW, LENGTH)) for head in layer[0])


def test_random_anchors_follow_their_seed() -> None:
    ids = tokens(1, LENGTH)

    def kept(seed: int) -> list[Any]:
        press = kvpress.get_press(f"kvcrush(keydiff:0.6):share=0.8,seed={seed}")
        positions = kvpress.kept_positions(prefill(tiny_model("llama"), press, ids))
        return [[head.tolist() for head in layer[0]] for layer in positions]

    assert kept(1) == kept(1)
    assert len({str(kept(seed)) for seed in range(6)}) > 1


def test_a_row_keeps_the_same_pairs_alone_and_padded() -> None:
    model, press = tiny_model("llama"), kvpress.get_press("kvcrush(snapkv:0.6,window_size=4):share=0.5")
    ids, mask = padded_batch([LENGTH, 41])
    padded = kvpress.kept_positions(prefill(model, press, ids, mask))
    alone = kvpress.kept_positions(prefill(model, press, ids[1:, -41:]))
    for layer, other in zip(padded, alone, strict=True):
        for head, other_head in zip(layer[1], other[0], strict=True):
            assert torch.equal(head[head >= LENGTH - 41] - (LENGTH - 41), other_head)


def test_in_a_later_turn_evicted_tokens_have_a_zero_bit() -> None:
    """Heads store different tokens then; signatures are by token, not by slot."""
    model, press = tiny_model("llama"), kvpress.get_press("kvcrush(keydiff:0.5):share=0.4,anchor=ones")
    cache = prefill(model, press, tokens(1, 40))
    before = [[head.tolist() for head in layer[0]] for layer in kvpress.kept_positions(cache)]
    recorded: dict[int, Any] = {}
    read_scored(model, cache, tokens(1, 20, seed=5), press, recorded)
    after = kvpress.kept_positions(cache)
    for layer, (positions, scores) in recorded.items():
        halves = [
            set(positions[h][scores[h].argsort(descending=True)[: len(positions[h]) // 2]].tolist()) for h in range(2)
        ]
        for h in range(2):
            stored = positions[h].tolist()
            assert stored == before[layer][h] + list(range(40, 60))
            count = len(after[layer][0][h])
            num_others = round(0.4 * count)
            best = set(positions[h][scores[h].argsort(descending=True)[: count - num_others]].tolist())
            distance = {t: sum(t not in half for half in halves) for t in stored}
            others = sorted(set(stored) - best, key=lambda t: (distance[t], t))
            steps = [round_half_up(r * num_others / len(others)) for r in range(len(others) + 1)]
            chosen = {t for r, t in enumerate(others) if steps[r + 1] > steps[r]}
            assert set(after[layer][0][h].tolist()) == best | chosen


def read_scored(model: Any, cache: Any, ids: Tensor, press: Any, recorded: dict[int, Any]) -> None:
    """Read a later turn; store positions and inner scores `[H, n]` of each layer."""
    plain = Representatives.scores

    def scores(self: Any, view: Any) -> Tensor:
        result = plain(self, view)
        recorded[view.layer] = (view.positions[0], result[0])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Representatives, "scores", scores)
        with press(model):
            model(ids, past_key_values=cache)


@pytest.mark.parametrize(("length", "count"), [(10, 0), (10, 3), (10, 10), (7, 1), (0, 0)])
def test_even_steps_are_exact_in_number_and_even(length: int, count: int) -> None:
    mask = at_even_steps(torch.arange(12)[None, None], torch.tensor([[length]]), torch.tensor([[count]]))
    marked = mask[0, 0].nonzero().flatten().tolist()
    assert len(marked) == count
    assert all(rank < length for rank in marked)
    gaps = {b - a for a, b in pairwise(marked)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("kvcrush(adakv(snapkv:0.5))", TypeError, "both choose the pairs to keep"),
        ("adakv(kvcrush(snapkv:0.5))", TypeError, "both choose the pairs to keep"),
        ("kvcrush(nacl:0.5)", TypeError, "both choose the pairs to keep"),
        ("kvcrush(knorm:0.5):share=2", ValueError, r"share must be in \[0, 1\], got 2"),
        (
            "kvcrush(knorm:0.5):anchor=mean",
            ValueError,
            "anchor must be 'random', 'zeros', 'ones' or 'alternate', got 'mean'",
        ),
    ],
)
def test_settings_and_compositions_that_cannot_work_are_refused(spec: str, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        kvpress.get_press(spec)
